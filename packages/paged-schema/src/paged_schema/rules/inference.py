"""LOAD: type and shape inference, for every execution provider alike."""

from __future__ import annotations

from paged_schema.dtypes import UNDEFINED
from paged_schema.facts import Facts, int64, known
from paged_schema.inputs import OUTPUT_NAMES, Dim, TensorSpec
from paged_schema.rules.registry import Fault, rule


@rule("L11", "load", "kv_cache_layout is exactly SEPARATE or LATENT", "FAIL")
def _(f: Facts) -> Fault | None:
    layout = f.attributes.kv_cache_layout
    return (
        None if layout in ("SEPARATE", "LATENT") else Fault("kv_cache_layout", layout, "SEPARATE or LATENT")
    )


@rule("L12", "load", "the query has rank 2", "FAIL")
def _(f: Facts) -> Fault | None:
    shape = _shape(f.query)
    return None if shape is None or len(shape) == 2 else Fault("query", f"rank {len(shape)}", "rank 2")


@rule("L15", "load", "LATENT: num_heads is above 0", "FAIL")
def _(f: Facts) -> Fault | None:
    if not f.latent or _shape(f.query) is None or f.attributes.num_heads > 0:
        return None
    return Fault("num_heads", f.attributes.num_heads, "above 0")


@rule("L16", "load", "LATENT with v_head_size: the query width is a multiple of num_heads", "FAIL")
def _(f: Facts) -> Fault | None:
    width = _latent_width(f)
    if width is None or width % f.attributes.num_heads == 0:
        return None
    return Fault("query", width, f"a width that is a multiple of num_heads {f.attributes.num_heads}")


@rule("L17", "load", "LATENT: v_head_size is at most the head size", "FAIL")
def _(f: Facts) -> Fault | None:
    width = _latent_width(f)
    if width is None or f.attributes.v_head_size <= width // f.attributes.num_heads:
        return None
    return Fault("v_head_size", f.attributes.v_head_size, f"at most {width // f.attributes.num_heads}")


@rule(
    "L13",
    "load",
    "no value in SEPARATE: the packed width is a known number above 0, as are the heads",
    "FAIL",
)
def _(f: Facts) -> Fault | None:
    shape = _packed_shape(f)
    if shape is None:
        return None
    if f.attributes.num_heads <= 0 or f.attributes.kv_num_heads < 0:
        return Fault("num_heads", (f.attributes.num_heads, f.attributes.kv_num_heads), "head counts above 0")
    if not isinstance(shape[1], int) or shape[1] <= 0:
        return Fault("query", f"width {shape[1]}", "a fixed width above 0, as ORT splits packed QKV at load")
    return None


@rule(
    "X02", "load", "no value in SEPARATE: num_heads + 2 * kv_num_heads does not wrap to 0 in 64 bits", "CRASH"
)
def _(f: Facts) -> Fault | None:
    if _packed_width(f) is None or packed_heads(f) != 0:
        return None
    heads = (f.attributes.num_heads, f.attributes.kv_num_heads)
    return Fault("kv_num_heads", heads, "a sum that does not wrap to 0; ORT divides by it and dies")


@rule("L14", "load", "no value in SEPARATE: the width is a multiple of num_heads + 2 * kv_num_heads", "FAIL")
def _(f: Facts) -> Fault | None:
    width = _packed_width(f)
    if width is None or width % packed_heads(f) == 0:
        return None
    return Fault(
        "query", width, f"a width that is a multiple of num_heads + 2 * kv_num_heads = {packed_heads(f)}"
    )


@rule("L18", "load", "LATENT lists at most two output slots", "FAIL")
def _(f: Facts) -> Fault | None:
    if not f.latent or len(f.outputs) <= 2:
        return None
    return Fault(
        "value_cache_out", "a third output slot", "at most two output slots with LATENT, even empty ones"
    )


@rule("L19", "load", "SEPARATE lists one output slot or three", "FAIL")
def _(f: Facts) -> Fault | None:
    if f.latent or len(f.outputs) != 2:
        return None
    return Fault("value_cache_out", "two output slots", "one output slot or three with SEPARATE")


@rule("L20", "load", "SEPARATE with three output slots has a value_cache", "FAIL")
def _(f: Facts) -> Fault | None:
    if len(f.outputs) != 3 or f.value_cache is not None:
        return None
    return Fault("value_cache", "nothing", "the input is present, as value_cache_out has a slot")


@rule("L22", "load", "more than one output slot: the key cache has a shape", "FAIL")
def _(f: Facts) -> Fault | None:
    if len(f.outputs) == 1 or _shape(f.key_cache) is not None:
        return None
    return Fault("key_cache", "no shape", "a declared shape")


@rule("L21", "load", "more than one output slot: the key cache has rank 4", "FAIL")
def _(f: Facts) -> Fault | None:
    rank = len(_shape(f.key_cache) or ())
    if len(f.outputs) == 1 or rank == 4:
        return None
    return Fault("key_cache", f"rank {rank}", "rank 4: (num_blocks, block_size, kv_num_heads, head_size)")


@rule("L10", "load", "a declared output has the element type of its input", "FAIL")
def _(f: Facts) -> Fault | None:
    for index, spec in enumerate(f.outputs):
        expected = f.dtype if index == 0 else f.cache_dtype
        if spec is not None and spec.dtype not in (UNDEFINED, expected):
            return Fault(OUTPUT_NAMES[index], spec.dtype, expected)
    return None


def _shape(spec: TensorSpec | None) -> tuple[Dim, ...] | None:
    return None if spec is None else spec.shape


def _latent_width(f: Facts) -> int | None:
    shape = _shape(f.query)
    if not f.latent or shape is None or f.attributes.v_head_size == 0:
        return None
    # ORT takes a width of 0 for an unknown one here.
    return known(shape[1]) or None


def _packed_shape(f: Facts) -> tuple[Dim, ...] | None:
    # Shape inference goes by the absence of value, the kernel by the absence of key.
    return None if f.latent or f.value is not None else _shape(f.query)


def _packed_width(f: Facts) -> int | None:
    shape = _packed_shape(f)
    return None if shape is None else known(shape[1])


def packed_heads(f: Facts) -> int:
    """Return the heads of one packed row, wrapped as ORT's 64-bit sum wraps."""
    return int64(f.attributes.num_heads + int64(2 * f.attributes.kv_num_heads))
