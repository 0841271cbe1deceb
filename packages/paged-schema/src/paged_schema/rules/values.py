"""RUN: the width of a value head, and what a LATENT node must do without."""

from __future__ import annotations

from paged_schema.facts import Facts
from paged_schema.inputs import TensorSpec
from paged_schema.rules.registry import KERNELS, Fault, rule


@rule("R06a", "run", "v_head_size is 0 or 1 to the head size", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.v_head_size == 0 or f.hs is None or 1 <= f.v_head_size <= f.hs:
        return None
    return Fault("v_head_size", f.v_head_size, f"0, or 1 to the head size {f.hs}")


@rule("R06b", "run", "a v_head_size below the head size needs LATENT", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.latent or not _narrow(f):
        return None
    return Fault("v_head_size", f.v_head_size, f"0 or the head size {f.hs} with SEPARATE")


@rule(
    "R06c",
    "run",
    "a v_head_size below the head size needs an explicit scale",
    "INVALID_ARGUMENT",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    if f.explicit_scale or not _narrow(f):
        return None
    given = "nothing" if f.attributes.scale is None else f.attributes.scale
    return Fault("scale", given, "a scale other than 0: 1/sqrt(head_size) is wrong for an absorbed latent")


@rule("R07a", "run", "LATENT: value_cache is absent", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _absent(f, "value_cache", f.value_cache)


@rule("R07b", "run", "LATENT: kv_num_heads is 1", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return Fault("kv_num_heads", f.kvh, "1 with LATENT") if f.latent and f.kvh != 1 else None


@rule("R07c", "run", "LATENT: head_sink is absent", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _absent(f, "head_sink", f.head_sink)


@rule("R07d", "run", "LATENT: the norm weights are absent", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _absent(f, "q_norm_weight", f.q_norm_weight) or _absent(f, "k_norm_weight", f.k_norm_weight)


@rule("R07e", "run", "LATENT: nothing quantises a value cache", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.latent and f.v_quant != "NONE":
        return Fault("v_quant_type", f.v_quant, "NONE with LATENT; k_quant_type describes the one cache")
    if f.latent and f.v_cache_dtype:
        return Fault(
            "v_cache_dtype", f.v_cache_dtype, "empty with LATENT; k_cache_dtype describes the one cache"
        )
    return _absent(f, "v_scale", f.v_scale)


@rule("R07f", "run", "SEPARATE: value_cache is present", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.latent or f.value_cache is not None:
        return None
    return Fault("value_cache", "nothing", "the value cache")


def _narrow(f: Facts) -> bool:
    return f.v_head_size != 0 and f.hs is not None and f.v_head_size != f.hs


def _absent(f: Facts, name: str, spec: TensorSpec | None) -> Fault | None:
    return Fault(name, str(spec), "absent with LATENT") if f.latent and spec is not None else None
