"""RUN, after the shape checks: what the CUDA kernel asks before it launches."""

from __future__ import annotations

from typing import Final

from paged_schema import backends
from paged_schema.eligibility import (
    NO_SINK,
    SHARED_MEMORY,
    Problem,
    flash_gather,
    flash_paged,
    latent_shared_bytes,
)
from paged_schema.facts import Facts, known
from paged_schema.rules.registry import CUDA, KERNELS, Fault, Rule, group, rule
from paged_schema.rules.shapes import dim_of

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
    if not f.latent or f.hs is None or _empty(f):
        return None
    needed = latent_shared_bytes(f.hs, f.v_head_size or f.hs)
    if needed <= SHARED_MEMORY:
        return None
    return Fault("query", f"{needed} bytes of shared memory", f"at most {SHARED_MEMORY}: smaller head sizes")


@rule(
    "P05",
    "select",
    "metadata entries are 0 or above, lower bound <= upper",
    "INVALID_ARGUMENT",
    providers=CUDA,
)
def _(f: Facts) -> Fault | None:
    entries = f.values.metadata if f.values is not None else None
    if entries is None or f.metadata_spec is None or _empty(f):
        return None
    if len(entries) not in (2, 3) or any(entry < 0 for entry in entries):
        return Fault("attention_metadata", entries, "2 or 3 entries of 0 or above")
    bound = _kv_bound(f, entries[1]) if len(entries) == 3 else None
    if bound is None or entries[2] <= bound:
        return None
    return Fault("attention_metadata", entries, f"a lower bound of at most {bound}")


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
    Rule(
        "P09",
        "select",
        "head_sink is not left to memory-efficient attention",
        "INVALID_ARGUMENT",
        providers=ORT_CUDA,
    ),
)
def _(f: Facts) -> Fault | None:
    if _empty(f):
        return None
    problem = _problem(f)
    # The last ones ask the least.
    if any(not test(problem) for _, test in reversed(backends.order(problem))):
        return None
    attempts = backends.attempts(problem)
    why = "; ".join(f"{name}: {reasons[0]}" for name, reasons in attempts)
    if attempts[-1][1] == [NO_SINK]:
        return Fault("head_sink", "memory-efficient attention", f"a backend that has a sink ({why})", "P09")
    return Fault("query", "no backend", f"one that takes the call ({why})", "P08")


@rule(
    "P10",
    "select",
    "SEPARATE with rotary or norms: the head size is at most 1024",
    "EXCEPTION",
    providers=ORT_CUDA,
)
def _(f: Facts) -> Fault | None:
    # Rotary tables of width 0 rotate nothing, but the launch is the same.
    active = f.q_norm_weight is not None or f.attributes.do_rotary == 1
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
    return flash_gather(p) if p.quantised else flash_paged(p)


def _kv_bound(f: Facts, given: int) -> int | None:
    width, size = dim_of(f.block_table, 1), known(f.bs)
    bounds = [given] if given else []
    if width is not None and size is not None:
        bounds.append(width * size)
    return min(bounds, default=None)


def _problem(f: Facts) -> Problem:
    # What only decides between backends that both take the call is left out.
    entries = f.values.metadata if f.values is not None else None
    return Problem(
        minor=f.target.minor,
        sm=f.target.sm,
        dtype=f.dtype,
        cache_dtype=f.cache_dtype,
        latent=f.latent,
        head_size=f.hs,
        v_head_size=f.vhs,
        block_size=f.bs,
        tokens=f.tokens,
        batch=f.batch,
        sink=f.head_sink is not None,
        causal=f.causal,
        metadata=f.metadata_spec is not None,
        max_query=entries[0] if entries else None,
    )
