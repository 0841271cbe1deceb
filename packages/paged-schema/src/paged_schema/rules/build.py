"""BUILD: the kernel's constructor, at session creation. A fault here is an exception, not a status."""

from __future__ import annotations

import math
from typing import Final

from paged_schema.dtypes import UNDEFINED
from paged_schema.facts import QUANTISED, Facts
from paged_schema.rules.registry import KERNELS, Fault, rule

QUANT_TYPES: Final = ("NONE", "PER_TENSOR", "PER_CHANNEL")
CACHE_DTYPES: Final = ("", "float16", "bfloat16", "int8", "float8e4m3fn", "int4", "float4e2m1")


@rule("N01", "build", "the execution provider has a kernel for the operator", "NOT_IMPLEMENTED")
def _(f: Facts) -> Fault | None:
    if f.target.provider != "cpu":
        return None
    return Fault("provider", "cpu", "cuda or webgpu; no ORT release has a CPU kernel")


@rule(
    "N02",
    "build",
    "the provider has a kernel for this pair of element types",
    "NOT_IMPLEMENTED",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    t, cache = f.dtype, f.cache_dtype
    if UNDEFINED in (t, cache):
        return None
    if f.target.provider == "webgpu" and (t, cache) != ("float16", "float16"):
        return Fault("key_cache", f"query {t}, cache {cache}", "float16 for both on WebGPU")
    if cache != t and cache not in QUANTISED:
        return Fault(
            "key_cache", f"query {t}, cache {cache}", "a cache of the query's type or a quantised one"
        )
    return None


@rule("C01", "build", "num_heads is above 0", "EXCEPTION", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    heads = f.attributes.num_heads
    return None if heads > 0 else Fault("num_heads", heads, "above 0")


@rule("C02", "build", "kv_num_heads is above 0 and divides num_heads", "EXCEPTION", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    heads, kv_heads = f.attributes.num_heads, f.attributes.kv_num_heads
    if kv_heads > 0 and heads % kv_heads == 0:
        return None
    return Fault("kv_num_heads", kv_heads, f"above 0, and a divisor of num_heads {heads}")


@rule("C03", "build", "qk_norm_epsilon is finite and above 0, norms or not", "EXCEPTION", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if math.isfinite(f.epsilon) and f.epsilon > 0:
        return None
    return Fault("qk_norm_epsilon", f.attributes.qk_norm_epsilon, "finite and above 0 in float32")


@rule(
    "C04",
    "build",
    "the quant types are NONE, PER_TENSOR or PER_CHANNEL, in any case",
    "EXCEPTION",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    for name, given in (("k_quant_type", f.k_quant), ("v_quant_type", f.v_quant)):
        if given not in QUANT_TYPES:
            return Fault(name, getattr(f.attributes, name), "NONE, PER_TENSOR or PER_CHANNEL")
    return None


@rule(
    "C05", "build", "the cache dtypes are names that ORT knows, in any case", "EXCEPTION", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    for name, given in (("k_cache_dtype", f.k_cache_dtype), ("v_cache_dtype", f.v_cache_dtype)):
        if given not in CACHE_DTYPES:
            return Fault(
                name, getattr(f.attributes, name), "empty, float16, bfloat16, int8, float8e4m3fn or int4"
            )
    return None


@rule("C07", "build", "v_head_size, cut to 32 bits, is not negative", "EXCEPTION", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    size = f.v_head_size
    return None if size >= 0 else Fault("v_head_size", size, "0 or above")


@rule("C08", "build", "rotary_offset, cut to 32 bits, is not negative", "EXCEPTION", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    offset = f.rotary_offset
    return None if offset >= 0 else Fault("rotary_offset", offset, "0 or above")
