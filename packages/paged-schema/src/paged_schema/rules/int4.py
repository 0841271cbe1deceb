"""RUN: what the kernel asks of packed INT4 caches before the shape checks, from ORT 1.30 on."""

from __future__ import annotations

from paged_schema.facts import Facts
from paged_schema.rules.registry import KERNELS, Fault, rule


@rule("I01", "run", "INT4: the layout is SEPARATE", "FAIL", since=30, providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return (
        Fault("kv_cache_layout", "LATENT", "SEPARATE with a uint8 (INT4) cache")
        if f.int4 and f.latent
        else None
    )


@rule("I02", "run", "INT4: k_cache_dtype and v_cache_dtype say int4", "FAIL", since=30, providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if not f.int4:
        return None
    for name, given in (("k_cache_dtype", f.k_cache_dtype), ("v_cache_dtype", f.v_cache_dtype)):
        if given not in ("int4", "float4e2m1"):
            return Fault(name, given, "int4 for a uint8 cache")
    return None


@rule(
    "I03",
    "run",
    "INT4: float4e2m1 is not implemented by any release",
    "INVALID_ARGUMENT",
    since=30,
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    for name, given in (("k_cache_dtype", f.k_cache_dtype), ("v_cache_dtype", f.v_cache_dtype)):
        if f.int4 and given == "float4e2m1":
            return Fault(name, given, "int4 for a uint8 cache")
    return None
