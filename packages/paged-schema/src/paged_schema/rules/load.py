"""LOAD: the schema verifier, the type checker and shape inference, for every execution provider alike."""

from __future__ import annotations

from typing import Final

from paged_schema.attributes import KINDS, MALFORMED, REQUIRED_ATTRIBUTES
from paged_schema.dtypes import UNDEFINED
from paged_schema.facts import Facts, int64, known
from paged_schema.inputs import INPUT_NAMES, MIN_INPUT_SLOTS, OUTPUT_NAMES, Dim, TensorSpec
from paged_schema.rules.registry import Fault, Rule, group, rule

T_TYPES: Final = frozenset({"float16", "bfloat16"})
CACHE_TYPES_29: Final = frozenset({"float16", "bfloat16", "int8", "float8e4m3fn"})
CACHE_TYPES: Final = CACHE_TYPES_29 | {"uint8"}
INT32: Final = frozenset({"int32"})
FLOAT32: Final = frozenset({"float32"})

T_INPUTS: Final = frozenset({0, 1, 2, 8, 9, 11, 12, 13})
CACHE_INPUTS: Final = frozenset({3, 4})
SCALE_INPUTS: Final = frozenset({14, 15})


@group(
    Rule("L23", "load", "no attribute is given twice", "INVALID_GRAPH"),
    Rule("L25", "load", "every attribute has a name, a kind, and data of that kind alone", "INVALID_GRAPH"),
)
def _(f: Facts) -> Fault | None:
    seen: set[str] = set()
    for name, kind in f.kinds:
        if name in seen:
            return Fault(name, "two values", "one value", "L23")
        if not name or kind == MALFORMED:
            return Fault(
                name or "attribute", "no name, no kind or foreign data", "a well-formed attribute", "L25"
            )
        seen.add(name)
    return None


@rule("L04", "load", "the node lists 8 to 17 input slots", "INVALID_GRAPH")
def _(f: Facts) -> Fault | None:
    if MIN_INPUT_SLOTS <= f.input_slots <= len(INPUT_NAMES):
        return None
    return Fault("inputs", f"{f.input_slots} slots", "8 to 17 input slots")


@rule("L05", "load", "the node lists 1 to 3 output slots", "INVALID_GRAPH")
def _(f: Facts) -> Fault | None:
    if 1 <= len(f.outputs) <= len(OUTPUT_NAMES):
        return None
    return Fault("outputs", f"{len(f.outputs)} slots", "1 to 3 output slots")


@rule("L06", "load", "no required input is left empty", "INVALID_GRAPH")
def _(f: Facts) -> Fault | None:
    if f.query and f.key_cache and f.cumulative_sequence_length and f.past_seqlens and f.block_table:
        return None
    name = next(INPUT_NAMES[index] for index in (0, 3, 5, 6, 7) if f.inputs[index] is None)
    return Fault(name, "nothing", "the input is present")


@rule("L24", "load", "the first output is named", "INVALID_GRAPH")
def _(f: Facts) -> Fault | None:
    return None if f.outputs[0] is not None else Fault("output", "an empty name", "a name")


@group(
    Rule(
        "L03", "load", "every attribute is one that the version knows (is_causal from 1.30)", "INVALID_GRAPH"
    ),
    Rule("L02", "load", "every attribute has the kind of the schema", "INVALID_GRAPH"),
)
def _(f: Facts) -> Fault | None:
    for name, kind in f.kinds:
        expected = KINDS.get(name)
        if expected is None or (name == "is_causal" and f.target.minor < 30):
            return Fault(name, "an unknown attribute", "a name that this ORT version knows", "L03")
        if kind != expected:
            return Fault(name, kind, f"an attribute of kind {expected}", "L02")
    return None


@rule("L01", "load", "num_heads and kv_num_heads are given", "INVALID_GRAPH")
def _(f: Facts) -> Fault | None:
    given = {name for name, _ in f.kinds}
    for name in sorted(REQUIRED_ATTRIBUTES):
        if name not in given:
            return Fault(name, "nothing", "the attribute is present")
    return None


def allowed_types(index: int, f: Facts) -> frozenset[str]:
    """Return the element types that one input may have."""
    if index in T_INPUTS:
        return T_TYPES | FLOAT32 if "float32" in f.target.extensions else T_TYPES
    if index in CACHE_INPUTS:
        types = CACHE_TYPES if f.target.minor >= 30 else CACHE_TYPES_29
        return types | FLOAT32 if "float32" in f.target.extensions else types
    return FLOAT32 if index in SCALE_INPUTS else INT32


@group(
    Rule("L07", "load", "every input has an element type of its constraint", "INVALID_GRAPH"),
    Rule("L08", "load", "every T input has the element type of the query", "FAIL"),
    Rule("L09", "load", "both caches have one element type", "FAIL"),
)
def _(f: Facts) -> Fault | None:
    t = cache = ""
    for index, spec in enumerate(f.inputs):
        if spec is None or spec.dtype == UNDEFINED:
            continue
        allowed = allowed_types(index, f)
        if spec.dtype not in allowed:
            return Fault(INPUT_NAMES[index], spec.dtype, f"one of {', '.join(sorted(allowed))}", "L07")
        if index in T_INPUTS:
            t = t or spec.dtype
            if spec.dtype != t:
                return Fault(INPUT_NAMES[index], spec.dtype, f"the query's type, {t}", "L08")
        elif index in CACHE_INPUTS:
            cache = cache or spec.dtype
            if spec.dtype != cache:
                return Fault(INPUT_NAMES[index], spec.dtype, f"the key cache's type, {cache}", "L09")
    return None


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
