"""RUN, continued: quantised caches and the metadata tensor, keys first, then values."""

from __future__ import annotations

import math
from typing import Final

from paged_schema.dtypes import UNDEFINED
from paged_schema.errors import Status
from paged_schema.facts import QUANTISED, Facts, known
from paged_schema.inputs import TensorSpec
from paged_schema.rules.registry import KERNELS, Fault, Rule, group, rule

INVALID: Final[Status] = "INVALID_ARGUMENT"


@group(
    Rule("R16a", "run", "no quant type: no scale", INVALID, providers=KERNELS),
    Rule("R16b", "run", "no quant type: the cache is not quantised", INVALID, providers=KERNELS),
    Rule("R16c", "run", "a quant type: the cache is quantised", INVALID, providers=KERNELS),
    Rule("R16d", "run", "a quant type: the scale is present", INVALID, providers=KERNELS),
    Rule("R16e", "run", "PER_TENSOR: the scale has one element", INVALID, providers=KERNELS),
    Rule("R16f", "run", "PER_CHANNEL: kv_num_heads * head_size elements, rows of head_size", INVALID,
         providers=KERNELS),
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    fault = _side(f, "k", f.k_quant, f.k_scale)
    return fault if fault or f.latent else _side(f, "v", f.v_quant, f.v_scale)


def _side(f: Facts, side: str, quant: str, scale: TensorSpec | None) -> Fault | None:
    name, dtype = f"{side}_scale", f.cache_dtype
    if quant == "NONE":
        if scale is not None:
            return Fault(name, str(scale), f"absent while {side}_quant_type is NONE", "R16a")
        if dtype in QUANTISED:
            return Fault(
                f"{side}_quant_type", "NONE", f"PER_TENSOR or PER_CHANNEL for a cache of {dtype}", "R16b"
            )
        return None
    if dtype != UNDEFINED and dtype not in QUANTISED:
        return Fault(f"{side}_quant_type", quant, f"NONE for a cache of {dtype}", "R16c")
    if scale is None:
        return Fault(name, "nothing", f"the scale of {side}_quant_type {quant}", "R16d")
    return _scale_shape(f, name, quant, scale)


def _scale_shape(f: Facts, name: str, quant: str, scale: TensorSpec) -> Fault | None:
    count = _elements(scale)
    if quant == "PER_TENSOR":
        return None if count in (None, 1) else Fault(name, str(scale), "one element, in any rank", "R16e")
    if scale.shape is None or f.hs is None:
        return None
    rows = all(known(dim) in (None, f.hs) for dim in scale.shape[-1:])
    if rows and count in (None, f.kvh * f.hs):
        return None
    return Fault(name, str(scale), f"{f.kvh * f.hs} elements, the last dimension {f.hs}", "R16f")


def _elements(scale: TensorSpec) -> int | None:
    if scale.shape is None:
        return None
    dims = [known(dim) for dim in scale.shape]
    return None if None in dims else math.prod(dim for dim in dims if dim is not None)


@group(
    Rule(
        "R17",
        "run",
        "k_cache_dtype and v_cache_dtype are empty or name the storage",
        INVALID,
        providers=KERNELS,
    ),
    Rule("I02", "run", "INT4: k_cache_dtype and v_cache_dtype say int4", "FAIL", since=30, providers=KERNELS),
)
def _(f: Facts) -> Fault | None:
    for name, given in (("k_cache_dtype", f.k_cache_dtype), ("v_cache_dtype", f.v_cache_dtype)):
        if f.int4 and given != "int4":
            return Fault(name, given, "int4 for a uint8 cache", "I02")
        if given and not f.int4 and f.cache_dtype != UNDEFINED and given != f.cache_dtype:
            return Fault(name, given, f"empty or {f.cache_dtype}, as the cache is stored", "R17")
    return None


@rule(
    "R18", "run", "attention_metadata has rank 1 and 2 entries (2 or 3 from 1.30)", INVALID, providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    spec = f.metadata_spec
    if spec is None or spec.shape is None:
        return None
    lengths = (2,) if f.target.minor < 30 else (2, 3)
    if len(spec.shape) == 1 and (known(spec.shape[0]) is None or spec.shape[0] in lengths):
        return None
    return Fault("attention_metadata", str(spec), f"rank 1 of {' or '.join(map(str, lengths))} entries")


@rule("X07", "run", "num_heads is above 0 when cut to 32 bits", "CRASH", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.nh > 0:
        return None
    return Fault("num_heads", f.attributes.num_heads, "below 2**31; ORT computes with its low 32 bits")
