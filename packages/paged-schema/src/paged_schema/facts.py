"""Everything the rules read about one node, worked out once.

A derived value is None when a dimension that it needs is symbolic or unknown, or when ORT would have refused
the node before the value is used. Rules never divide.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from paged_schema.attributes import KINDS, PagedAttentionAttributes
from paged_schema.dtypes import UNDEFINED
from paged_schema.errors import InvalidArgument
from paged_schema.inputs import Dim, TensorSpec

ORT_VERSIONS: Final = ("1.29", "1.30", "1.31", "1.32")
QUANTISED: Final = frozenset({"int8", "uint8", "float8e4m3fn"})
MODEL_KINDS: Final = tuple((name, kind) for name, kind in KINDS.items() if name != "is_causal")
MODEL_KINDS_CAUSAL: Final = tuple(KINDS.items())


@dataclass(frozen=True, slots=True)
class RunValues:
    """What the host knows at run time beyond shapes; every field is optional.

    Attributes:
        metadata: The entries of `attention_metadata`.
        addresses: Buffer address of each bound tensor, by input or output name.
        kv_tokens: Cached plus new tokens over the whole batch.
    """

    metadata: tuple[int, ...] | None = None
    addresses: Mapping[str, int] = field(default_factory=dict)
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.metadata is not None and not _is_tuple_of_ints(self.metadata):
            raise unknown("metadata", self.metadata, "a tuple of ints")
        if not _is_map_to_ints(self.addresses):
            raise unknown("addresses", self.addresses, "a mapping of names to ints")
        if self.kv_tokens is not None and not is_int(self.kv_tokens):
            raise unknown("kv_tokens", self.kv_tokens, "an int")


def is_int(value: object) -> bool:
    """Return whether this is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tuple_of_ints(value: object) -> bool:
    return isinstance(value, tuple) and all(map(is_int, value))


def _is_map_to_ints(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(is_int, value.values()))


@dataclass(frozen=True, slots=True)
class Target:
    """Whose contract decides.

    Attributes:
        minor: ORT's minor version, 29 to 32.
        provider: `cuda`, `webgpu`, `cpu` or `paged-cuda`.
        extensions: What is admitted beyond ORT, by name.
        sm: Compute capability as major * 10 + minor.
    """

    minor: int
    provider: str
    extensions: frozenset[str] = frozenset()
    sm: int = 80


def minor_of(version: object) -> int:
    """Return the minor number of a version of ORT, whatever its patch number, or raise A03."""
    short = ".".join(version.split(".")[:2]) if isinstance(version, str) else ""
    if short not in ORT_VERSIONS:
        raise unknown("ort", version, f"one of {', '.join(ORT_VERSIONS)}")
    return int(short.partition(".")[2])


def unknown(subject: str, got: object, expected: str) -> InvalidArgument:
    """A03: an argument that names nothing."""
    return InvalidArgument("load", "A03", subject, got, expected, "INVALID_GRAPH")


def known(dim: Dim) -> int | None:
    """Return a dimension's size, or None when it is symbolic, unknown or negative (ONNX's other unknown)."""
    return dim if isinstance(dim, int) and dim >= 0 else None


def int32(value: int) -> int:
    """Cut a 64-bit attribute to 32 bits, as ORT does once its build checks are done."""
    return (value + 2**31) % 2**32 - 2**31


def int64(value: int) -> int:
    """Wrap a sum or product as 64-bit arithmetic does."""
    return (value + 2**63) % 2**64 - 2**63


def float32(value: float) -> float:
    """Round to float32; what is too large becomes infinite, as in C."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class Facts:
    """One node as the rules see it.

    Attributes:
        target: Whose contract decides.
        attributes: The attributes.
        kinds: Name and ONNX kind of each attribute that the node carries.
        inputs: Input slots as listed; at least 17 after padding. Index them by the names below.
        input_slots: Number of input slots listed.
        outputs: Output slots as listed.
        values: Host values, where known.
        dtype: T, from the query or from whatever shares its type.
        cache_dtype: The caches' element type.
        nh, kvh: Head counts cut to 32 bits.
        latent, packed: Layout and mode as the kernel picks them.
        tokens: `query` dimension 0.
        hidden: `query` dimension 1.
        row_heads: Heads in one row of `query`.
        hs: Head size from the query.
        vhs: Value head size in effect.
        bs, nb: Block size and block count.
        batch: From `cumulative_sequence_length`.
        rd: Rotary dimension; 0 without rotary caches.
    """

    __slots__ = (
        "attributes", "batch", "block_table", "bs", "cache_dtype", "cos_cache",
        "cumulative_sequence_length", "dtype", "epsilon", "explicit_scale", "head_sink", "hidden", "hs",
        "input_slots", "inputs", "int4", "k_cache_dtype", "k_norm_weight", "k_quant", "k_scale", "key",
        "key_cache", "kinds", "kvh", "latent", "metadata_spec", "nb", "nh", "outputs", "packed",
        "past_seqlens", "q_norm_weight", "query", "rd", "rotary_offset", "row_heads", "scale",
        "sin_cache", "slot_mapping", "softcap", "target", "tokens", "v_cache_dtype", "v_head_size",
        "v_quant", "v_scale", "value", "value_cache", "values", "vhs", "window",
    )  # fmt: skip

    def __init__(
        self,
        target: Target,
        attributes: PagedAttentionAttributes,
        inputs: tuple[TensorSpec | None, ...],
        outputs: tuple[TensorSpec | None, ...],
        *,
        kinds: tuple[tuple[str, str], ...] | None = None,
        input_slots: int | None = None,
        values: RunValues | None = None,
    ) -> None:
        self.target = target
        self.attributes = attributes
        self.values = values
        self.inputs = inputs
        self.outputs = outputs
        self.input_slots = 17 if input_slots is None else input_slots
        if kinds is None:
            kinds = MODEL_KINDS if attributes.is_causal is None else MODEL_KINDS_CAUSAL
        self.kinds = kinds
        (
            self.query, self.key, self.value, self.key_cache, self.value_cache,
            self.cumulative_sequence_length, self.past_seqlens, self.block_table, self.cos_cache,
            self.sin_cache, self.slot_mapping, self.head_sink, self.q_norm_weight, self.k_norm_weight,
            self.k_scale, self.v_scale, self.metadata_spec,
        ) = inputs[:17]  # fmt: skip
        self.dtype = _first_type(self.query, inputs, (1, 2, 8, 9, 11, 12, 13))
        self.cache_dtype = _first_type(self.key_cache, inputs, (4,))
        self._read_attributes(attributes)
        self._derive()

    def _read_attributes(self, attributes: PagedAttentionAttributes) -> None:
        self.nh = int32(attributes.num_heads)
        self.kvh = int32(attributes.kv_num_heads)
        self.v_head_size = int32(attributes.v_head_size)
        self.rotary_offset = int32(attributes.rotary_offset)
        self.window = int32(attributes.local_window_size)
        self.epsilon = float32(attributes.qk_norm_epsilon)
        self.scale = 0.0 if attributes.scale is None else float32(attributes.scale)
        self.softcap = 0.0 if attributes.softcap is None else float32(attributes.softcap)
        self.explicit_scale = attributes.scale is not None and (
            self.scale != 0 or self.target.provider == "webgpu"
        )
        self.k_quant = _ascii_upper(attributes.k_quant_type)
        self.v_quant = _ascii_upper(attributes.v_quant_type)
        self.k_cache_dtype = attributes.k_cache_dtype.lower()
        self.v_cache_dtype = attributes.v_cache_dtype.lower()
        self.latent = attributes.kv_cache_layout == "LATENT"

    def _derive(self) -> None:
        self.packed = not self.latent and self.key is None
        query = self.query.shape if self.query is not None else None
        self.tokens: Dim = None
        self.hidden: int | None = None
        if query is not None and len(query) == 2:
            self.tokens = query[0]
            width = known(query[1])
            self.hidden = None if width is None else int32(width)
        self.row_heads = self.nh
        if self.packed:
            # ORT added the packed heads in 32 bits before 1.31.
            heads = self.nh + 2 * self.kvh
            self.row_heads = int32(heads) if self.target.minor < 31 else heads
        self.hs = None if self.hidden is None else _quotient(self.hidden, self.row_heads)
        self.vhs = self.v_head_size or self.hs
        cache = self.key_cache
        self.int4 = cache is not None and cache.dtype == "uint8"
        self.bs: Dim = None
        self.nb: Dim = None
        if cache is not None and cache.shape is not None and len(cache.shape) == 4:
            self.nb, self.bs = cache.shape[0], cache.shape[1]
        self.batch = _batch(self)
        self.rd: int | None = 0
        if self.cos_cache is not None:
            cos = self.cos_cache.shape
            width = known(cos[1]) if cos is not None and len(cos) >= 2 else None
            self.rd = None if width is None else 2 * width

    @property
    def causal(self) -> bool:
        """Whether the causal mask applies."""
        return self.attributes.is_causal is None or self.attributes.is_causal == 1


def _ascii_upper(text: str) -> str:
    # In C only a to z have a case; Python's upper() would make a long s an S.
    return text.upper() if text.isascii() else text


def _first_type(
    first: TensorSpec | None, inputs: tuple[TensorSpec | None, ...], others: tuple[int, ...]
) -> str:
    if first is not None and first.dtype != UNDEFINED:
        return first.dtype
    found = (spec.dtype for index in others if (spec := inputs[index]) is not None)
    return next((dtype for dtype in found if dtype != UNDEFINED), UNDEFINED)


def _quotient(dividend: int, divisor: int) -> int | None:
    # C truncates towards zero; a zero divisor is a rule's business.
    if divisor == 0:
        return None
    return dividend // divisor if divisor > 0 else -(dividend // -divisor)


def _batch(facts: Facts) -> Dim:
    bounds = facts.cumulative_sequence_length
    if bounds is not None and bounds.shape is not None and len(bounds.shape) == 1:
        length = known(bounds.shape[0])
        if length is not None:
            return length - 1
    for spec in (facts.past_seqlens, facts.block_table):
        if spec is not None and spec.shape:
            return spec.shape[0]
    return None
