"""LOAD: the schema verifier and the type checker, for every execution provider alike."""

from __future__ import annotations

from typing import Final

from paged_schema.attributes import KINDS, MALFORMED, REQUIRED_ATTRIBUTES
from paged_schema.dtypes import UNDEFINED
from paged_schema.facts import Facts
from paged_schema.inputs import INPUT_NAMES, MIN_INPUT_SLOTS, OUTPUT_NAMES
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
