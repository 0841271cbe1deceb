"""RUN: the rotary tables, judged whenever they are given, whether or not do_rotary uses them."""

from __future__ import annotations

from paged_schema.facts import Facts, known
from paged_schema.inputs import Dim, TensorSpec
from paged_schema.rules.registry import KERNELS, Fault, rule
from paged_schema.rules.shapes import dim_fault, dim_of


@rule("R14a", "run", "cos_cache and sin_cache come together", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if (f.cos_cache is None) == (f.sin_cache is None):
        return None
    return Fault(
        "cos_cache" if f.cos_cache is None else "sin_cache", "nothing", "both rotary caches or neither"
    )


@rule(
    "R14f", "run", "cos_cache and sin_cache have one shape", "INVALID_ARGUMENT", since=31, providers=KERNELS
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    cos, sin = _shape(f.cos_cache), _shape(f.sin_cache)
    if cos is None or sin is None:
        return None
    same = len(cos) == len(sin) and all(map(_agree, cos, sin))
    return None if same else Fault("sin_cache", str(f.sin_cache), f"the shape of cos_cache, {f.cos_cache}")


@rule("X01", "run", "the rotary caches have rank 2 or more", "CRASH", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    for name, spec in (("cos_cache", f.cos_cache), ("sin_cache", f.sin_cache)):
        if spec is not None and spec.shape is not None and len(spec.shape) < 2:
            return Fault(
                name, f"rank {len(spec.shape)}", "rank 2: (rows, rotary_dim / 2); ORT aborts on less"
            )
    return None


@rule(
    "R14b", "run", "rotary caches: the head size is a multiple of 16", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    if f.cos_cache is None or f.hs is None or f.hs % 16 == 0:
        return None
    return Fault(
        "cos_cache", f"head size {f.hs}", "a head size that is a multiple of 16, or no rotary caches"
    )


@rule(
    "R14d", "run", "rotary caches: the width is a multiple of 8, at most half a head", "INVALID_ARGUMENT",
    providers=KERNELS,
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    for name, spec in (("cos_cache", f.cos_cache), ("sin_cache", f.sin_cache)):
        width = dim_of(spec, 1)
        if width is None:
            continue
        if width % 8:
            return Fault(name, f"width {width}", "a multiple of 8")
        if f.hs is not None and width > f.hs // 16 * 8:
            return Fault(name, f"width {width}", f"at most {f.hs // 16 * 8}, half the head size {f.hs}")
    return None


@rule("R14e", "run", "cos_cache and sin_cache have one width", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return dim_fault("sin_cache", f.sin_cache, 1, dim_of(f.cos_cache, 1), "the width of cos_cache")


@rule(
    "R15", "run", "rotary_offset is a multiple of 8, and the range lies in the head", "INVALID_ARGUMENT",
    providers=KERNELS,
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    offset = f.rotary_offset
    if offset % 8:
        return Fault("rotary_offset", offset, "a multiple of 8")
    if f.hs is None or f.rd is None or offset + f.rd <= f.hs:
        return None
    return Fault("rotary_offset", f"{offset} + rotary dimension {f.rd}", f"at most the head size {f.hs}")


def _shape(spec: TensorSpec | None) -> tuple[Dim, ...] | None:
    return None if spec is None else spec.shape


def _agree(a: Dim, b: Dim) -> bool:
    return known(a) is None or known(b) is None or a == b
