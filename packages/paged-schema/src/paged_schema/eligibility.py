"""What rules each of ORT's CUDA backends out, as a list of reasons; empty means that nothing known does.

Source: what ORT's documentation and its released binaries show with default provider options,
and what the provider's own log said over 1.29 to 1.31.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paged_schema.facts import QUANTISED, known
from paged_schema.inputs import Dim

SHARED_MEMORY: Final = 48 * 1024
LATENT_FIXED_BYTES: Final = (64 + 256 + 64) * 4
DECODE_FIXED_BYTES: Final = (128 + 256) * 4
NO_SINK: Final = "head_sink is not implemented there"

MAX_SPECULATIVE: Final = 8

FLASH_BLOCK: Final = ((64, 256), (128, 128), (256, 64))
"""Head size up to which Flash on the paged cache asks for a multiple of which block size."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What backend selection looks at.

    Attributes:
        minor: ORT's minor version.
        sm: Compute capability as major * 10 + minor.
        dtype: Element type of the query.
        cache_dtype: Element type of the caches.
        latent: Whether the layout is LATENT.
        head_size: Head size, if known.
        v_head_size: Value head size, if known.
        group_size: Query heads a KV head.
        block_size: Tokens a block, if known.
        tokens: New tokens in the batch.
        batch: Sequences.
        sink: Whether head_sink is given.
        windowed: Whether a left window is set.
        softcapped: Whether a softcap is set.
        causal: Whether the causal mask applies.
        metadata: Whether attention_metadata is given.
        max_query: Its first entry, the bound on new tokens a sequence; 0 is no bound, None not known.
        per_channel: Whether both caches are quantised by channel.
    """

    minor: int
    sm: int
    dtype: str
    cache_dtype: str
    latent: bool
    head_size: int | None
    v_head_size: int | None
    block_size: Dim
    tokens: Dim
    batch: Dim
    sink: bool = False
    causal: bool = True
    metadata: bool = False
    max_query: int | None = None
    group_size: int = 1
    windowed: bool = False
    softcapped: bool = False
    per_channel: bool = False

    @property
    def quantised(self) -> bool:
        """Whether the caches hold codes."""
        return self.cache_dtype in QUANTISED

    @property
    def decode(self) -> bool | None:
        """Whether there are no more tokens than sequences; None when not known."""
        tokens, batch = known(self.tokens), known(self.batch)
        return None if tokens is None or batch is None else tokens <= batch


def latent_shared_bytes(head_size: int, v_head_size: int) -> int:
    """Shared memory in bytes that ORT's LATENT kernel takes for one block of threads.

    >>> latent_shared_bytes(576, 512)
    5888
    """
    return (head_size + v_head_size) * 4 + LATENT_FIXED_BYTES


def decode_shared_bytes(head_size: int) -> int:
    """Shared memory in bytes that ORT's paged decode kernel takes for one block of threads.

    >>> decode_shared_bytes(5952)
    49152
    """
    return 2 * head_size * 4 + DECODE_FIXED_BYTES


def flash_paged(p: Problem) -> list[str]:
    """Return what rules out FlashAttention over the paged cache."""
    reasons = _flash_common(p)
    if p.quantised:
        reasons.append("the cache is quantised")
    size, block = p.head_size, known(p.block_size)
    needed = next((multiple for limit, multiple in FLASH_BLOCK if size is not None and size <= limit), None)
    if block is not None and needed is not None and block % needed:
        reasons.append(f"block size {block} is not a multiple of {needed}")
    return reasons


def flash_gather(p: Problem) -> list[str]:
    """Return what rules out FlashAttention over a dequantised dense copy."""
    reasons = _flash_common(p)
    if not p.quantised:
        reasons.append("the cache is not quantised")
    return reasons


def _flash_common(p: Problem) -> list[str]:
    reasons = []
    if p.sm < 80:
        reasons.append(f"sm_{p.sm} is below sm_80")
    if p.head_size is not None and p.head_size > 256:
        reasons.append(f"head size {p.head_size} is above 256")
    return reasons


def paged_decode(p: Problem) -> list[str]:
    """Return what rules out the paged decode kernel."""
    reasons = []
    if p.decode is False and not int4_speculative(p):
        reasons.append(f"{p.tokens} tokens are more than {p.batch} sequences")
    if p.head_size is not None and decode_shared_bytes(p.head_size) > SHARED_MEMORY:
        needed = decode_shared_bytes(p.head_size)
        reasons.append(f"{needed} bytes of shared memory are more than {SHARED_MEMORY}")
    if p.minor == 30 and not p.causal:
        reasons.append("non-causal needs Flash in ORT 1.30")
    return reasons


def memory_efficient(p: Problem) -> list[str]:
    """Return what rules out memory-efficient attention over a gathered dense copy."""
    reasons = []
    needed = 80 if p.dtype == "bfloat16" else 53
    if p.sm < needed:
        reasons.append(f"sm_{p.sm} is below sm_{needed} for {p.dtype}")
    if p.head_size is not None and p.head_size > 1024:
        reasons.append(f"head size {p.head_size} is above 1024")
    if p.minor == 30 and not p.causal:
        reasons.append("non-causal needs Flash in ORT 1.30")
    if p.sink:
        reasons.append(NO_SINK)
    return reasons


def xqa(p: Problem) -> list[str]:
    """Return what rules out XQA, the decode kernel for quantised caches."""
    needed = 89 if p.cache_dtype == "float8e4m3fn" else 80
    block = known(p.block_size)
    checks = (
        (not p.quantised, "the cache is not quantised"),
        (p.sm < needed, f"sm_{p.sm} is below sm_{needed}"),
        (
            not _xqa_shape(p),
            f"no kernel for head size {p.head_size} with {p.group_size} query heads a KV head",
        ),
        (block is not None and block % 128 != 0, f"block size {block} is not a multiple of 128"),
        (p.softcapped, "softcap is set"),
        (p.minor == 30 and not p.causal and not _xqa_speculates(p), "the mask is not causal"),
        (not _one_each(p) and not _xqa_speculates(p), "not one new token for each sequence"),
    )
    return [reason for ruled_out, reason in checks if ruled_out]


def _xqa_shape(p: Problem) -> bool:
    if p.cache_dtype == "uint8":
        return (p.head_size in (None, 256), p.group_size, p.dtype, p.per_channel) == (
            True,
            6,
            "float16",
            True,
        )
    sizes, groups = ((64, 128), (4, 8, 16, 32)) if p.minor == 29 else ((64, 128, 256), (4, 6, 8, 16, 32))
    return p.group_size in groups and (p.head_size is None or p.head_size in sizes)


def _xqa_speculates(p: Problem) -> bool:
    """Return whether XQA takes 2 to 8 new tokens a sequence, which needs the host's bound."""
    if p.group_size != 6 or p.dtype != "float16" or not p.metadata:
        return False
    if p.head_size == 128:
        return p.minor >= 31 and p.cache_dtype == "int8" and _few_tokens(p)
    return p.head_size in (None, 256) and _few_tokens(p)


def cudnn(p: Problem) -> list[str]:
    """Return what rules out cuDNN's paged attention (ORT 1.31, from its pull request's text)."""
    checks = (
        (p.minor < 31, "ORT has it from 1.31"),
        (True, "it is off unless ORT_ENABLE_CUDNN_FLASH_ATTENTION is 1"),
        (p.sm < 90, f"sm_{p.sm} is below sm_90"),
        (p.quantised, "the cache is quantised"),
        (p.windowed, "a window is set"),
        (p.softcapped, "softcap is set"),
        (p.sink, "head_sink is given"),
        (not p.metadata, "attention_metadata is not given"),
        (not p.causal, "the mask is not causal"),
        (not _one_each(p), "not one new token for each sequence"),
    )
    return [reason for ruled_out, reason in checks if ruled_out]


def latent(p: Problem) -> list[str]:
    """Return what rules out the LATENT kernel."""
    if p.head_size is None or p.v_head_size is None:
        return []
    needed = latent_shared_bytes(p.head_size, p.v_head_size)
    if needed <= SHARED_MEMORY:
        return []
    return [f"{needed} bytes of shared memory are more than {SHARED_MEMORY}"]


def int4_speculative(p: Problem) -> bool:
    """Return whether the INT4 decode kernel takes several tokens a sequence."""
    return p.cache_dtype == "uint8" and p.metadata and _few_tokens(p)


def _few_tokens(p: Problem) -> bool:
    """Return whether the host's bound allows 2 to 8 new tokens a sequence, as far as it is known."""
    if p.max_query is None:
        return True
    # 0 is no bound.
    bounds = [bound for bound in (p.max_query, known(p.tokens)) if bound]
    return not bounds or 2 <= min(bounds) <= MAX_SPECULATIVE


def _one_each(p: Problem) -> bool:
    tokens, batch = known(p.tokens), known(p.batch)
    even = tokens is None or batch is None or tokens == batch
    return even and (p.max_query in (None, 0, 1) or tokens == 1)
