"""RUN, after the shape checks: what the CUDA kernel asks before it launches."""

from __future__ import annotations

from typing import Final

from paged_schema import backends
from paged_schema.backends import SHARED_MEMORY, Problem, latent_shared_bytes
from paged_schema.facts import Facts, known
from paged_schema.rules.registry import CUDA, KERNELS, Fault, Rule, group, rule

ORT_CUDA: Final = frozenset({"cuda"})
MAX_PROLOGUE_HEAD: Final = 1024


@rule("P01", "select", "do_rotary = 1 has both rotary caches", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.attributes.do_rotary != 1 or f.cos_cache is not None:
        return None
    return Fault("cos_cache", "nothing", "both rotary caches, as do_rotary is 1")


@rule("P02", "select", "a cache output is the buffer of its cache input", "INVALID_ARGUMENT", providers=CUDA)
def _(f: Facts) -> Fault | None:
    if f.values is None:
        return None
    for name in ("key_cache", "value_cache"):
        bound = f.values.addresses
        if f"{name}_out" in bound and name in bound and bound[f"{name}_out"] != bound[name]:
            return Fault(f"{name}_out", "another buffer", f"the buffer of {name}, which is updated in place")
    return None


@rule(
    "P04",
    "select",
    "LATENT: both head sizes fit the kernel's shared memory",
    "INVALID_ARGUMENT",
    providers=ORT_CUDA,
)
def _(f: Facts) -> Fault | None:
    if not f.latent or f.hs is None or f.vhs is None or _empty(f):
        return None
    needed = latent_shared_bytes(f.hs, f.vhs)
    if needed <= SHARED_MEMORY:
        return None
    return Fault("query", f"{needed} bytes of shared memory", f"at most {SHARED_MEMORY}: smaller head sizes")


@rule("P05", "select", "metadata entries are 0 or above, lower bound <= upper", "INVALID_ARGUMENT",
      providers=CUDA)  # fmt: skip
def _(f: Facts) -> Fault | None:
    entries = f.values.metadata if f.values is not None else None
    if entries is None or f.metadata_spec is None or _empty(f):
        return None
    if min(entries, default=0) < 0:
        return Fault("attention_metadata", entries, "entries of 0 or above")
    if len(entries) == 3 and entries[2] > _upper_bound(f, entries[1]):
        return Fault("attention_metadata", entries, f"a lower bound of at most {_upper_bound(f, entries[1])}")
    return None


@rule(
    "P06",
    "select",
    "non-causal needs the Flash backend",
    "INVALID_ARGUMENT",
    since=30,
    until=30,
    providers=ORT_CUDA,
)
def _(f: Facts) -> Fault | None:
    if f.causal or _empty(f):
        return None
    if f.latent:
        return Fault("is_causal", f.attributes.is_causal, "1 with LATENT before ORT 1.31")
    reasons = _flash_reasons(_problem(f))
    return (
        Fault("is_causal", f.attributes.is_causal, f"1, as Flash cannot take it: {reasons[0]}")
        if reasons
        else None
    )


@rule("P07", "select", "there is at least one key to attend to", "FAIL", providers=CUDA)
def _(f: Facts) -> Fault | None:
    total = f.values.kv_tokens if f.values is not None else None
    if total is None or total > 0 or f.latent or _empty(f):
        return None
    return Fault("past_seqlens", f"{total} cached and new tokens", "at least 1")


@group(
    Rule("P08", "select", "some backend takes the call", "INVALID_ARGUMENT", providers=ORT_CUDA),
    Rule("P09", "select", "head_sink is not left to memory-efficient attention", "INVALID_ARGUMENT",
         providers=ORT_CUDA),
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    if f.latent or _empty(f):
        return None
    attempts = backends.attempts(_problem(f))
    if any(not reasons for _, reasons in attempts):
        return None
    if attempts[-1][0] == "memory-efficient" and attempts[-1][1] == [backends.NO_SINK]:
        why = "; ".join(f"{name}: {reasons[0]}" for name, reasons in attempts[:-1])
        return Fault("head_sink", "memory-efficient attention", f"a backend that has a sink ({why})", "P09")
    why = "; ".join(f"{name}: {reasons[0]}" for name, reasons in attempts)
    return Fault("query", "no backend", f"one that takes the call ({why})", "P08")


@rule(
    "P10",
    "select",
    "SEPARATE with rotary or norms: the head size is at most 1024",
    "EXCEPTION",
    providers=ORT_CUDA,
)
def _(f: Facts) -> Fault | None:
    active = f.q_norm_weight is not None or (f.attributes.do_rotary == 1 and f.rd != 0)
    if f.latent or not active or f.hs is None or f.hs <= MAX_PROLOGUE_HEAD or _empty(f):
        return None
    return Fault("query", f"head size {f.hs}", f"at most {MAX_PROLOGUE_HEAD} with rotary or norms")


@rule("X05", "select", "SEPARATE with tokens: the head size is not 0", "CRASH", providers=ORT_CUDA)
def _(f: Facts) -> Fault | None:
    if f.latent or f.hs != 0 or known(f.tokens) in (None, 0):
        return None
    return Fault("query", "head size 0", "a head size above 0; ORT's launcher divides by it and dies")


def _empty(f: Facts) -> bool:
    # P03: without tokens ORT answers before it looks further.
    return f.tokens == 0


def _flash_reasons(p: Problem) -> list[str]:
    return backends.flash_gather(p) if p.quantised else backends.flash_paged(p)


def _upper_bound(f: Facts, given: int) -> int:
    spec = f.block_table
    width = (
        known(spec.shape[1]) if spec is not None and spec.shape is not None and len(spec.shape) == 2 else None
    )
    size = known(f.bs)
    capacity = None if width is None or size is None else width * size
    if capacity is None:
        return given if given > 0 else 2**31 - 1
    return min(given, capacity) if given > 0 else capacity


def _max_query(f: Facts) -> int | None:
    entries = f.values.metadata if f.values is not None else None
    return entries[0] if entries else None


def _problem(f: Facts) -> Problem:
    return Problem(
        minor=f.target.minor,
        sm=f.target.sm,
        dtype=f.dtype,
        cache_dtype=f.cache_dtype,
        latent=f.latent,
        head_size=f.hs,
        v_head_size=f.vhs,
        group_size=f.nh // f.kvh,
        block_size=f.bs,
        tokens=f.tokens,
        batch=f.batch,
        sink=f.head_sink is not None,
        windowed=f.window > 0,
        softcapped=f.softcap > 0,
        causal=f.causal,
        metadata=f.metadata_spec is not None,
        max_query=_max_query(f),
        per_channel=f.k_quant == f.v_quant == "PER_CHANNEL",
    )
