"""Seeded generator of PagedAttention nodes: valid ones, and named faults to put into them.

A fault is a small edit of a `Draft`. Some faults do nothing on some nodes (a LATENT node has no value cache
to remove); what the node then means is for the rules, and for ORT, to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from paged_schema.attributes import KINDS
from paged_schema.declaration import Attribute, AttributeValue, Declaration
from paged_schema.inputs import INPUT_NAMES, Dim, TensorSpec


@dataclass
class Draft:
    """A node under edit.

    Attributes:
        attributes: As listed.
        inputs: 17 slots by name.
        outputs: As listed.
        input_slots: How many slots are listed; None lists up to the last one in use, at least eight.
    """

    attributes: list[Attribute] = field(default_factory=list)
    inputs: dict[str, TensorSpec | None] = field(default_factory=lambda: dict.fromkeys(INPUT_NAMES))
    outputs: list[TensorSpec | None] = field(default_factory=list)
    input_slots: int | None = None

    def set(self, name: str, value: AttributeValue, kind: str | None = None) -> None:
        """Put an attribute, in the place of one of that name if there is one."""
        new = Attribute(name, kind or KINDS[name], value)
        at = next((index for index, old in enumerate(self.attributes) if old.name == name), None)
        if at is None:
            self.attributes.append(new)
        else:
            self.attributes[at] = new

    def drop(self, name: str) -> None:
        """Remove an attribute."""
        self.attributes = [attribute for attribute in self.attributes if attribute.name != name]

    def get(self, name: str, default: int = 0) -> int:
        """Return an integer attribute."""
        found = next(
            (a.value for a in self.attributes if a.name == name and isinstance(a.value, int)), default
        )
        return int(found)

    def declaration(self) -> Declaration:
        """Return the node."""
        slots = list(self.inputs.values())
        used = max((index + 1 for index, spec in enumerate(slots) if spec is not None), default=0)
        count = max(8, used) if self.input_slots is None else self.input_slots
        slots += [TensorSpec("int32", (2,))] * (count - len(slots))
        return Declaration(tuple(self.attributes), tuple(slots[:count]), tuple(self.outputs))


def valid(rng: Random, *, t: str = "bfloat16", int4: bool = True) -> Draft:
    """Draw a node that passes every rule of every version from 1.30 on, in random order of attributes.

    Args:
        rng: Source of randomness.
        t: Element type of query and output.
        int4: Whether to draw packed INT4 caches, which ORT 1.29 does not know.
    """
    draft = Draft()
    if rng.random() < 0.45:
        _latent(draft, rng, t)
    else:
        _separate(draft, rng, t, int4)
    if rng.random() < 0.3:
        draft.set("softcap", rng.choice((0.0, 15.0, 50.0)))
    if rng.random() < 0.3:
        draft.set("local_window_size", rng.choice((-1, 0, 1, 128)))
    rng.shuffle(draft.attributes)
    return draft


def _sizes(rng: Random) -> tuple[Dim, Dim, Dim, Dim, Dim]:
    """Return tokens, batch, cumulative length, blocks and table width, fixed or not."""
    batch = rng.randint(1, 4)
    tokens = rng.choice((0, batch, batch + 7))
    if rng.random() < 0.5:
        return tokens, batch, batch + 1, rng.choice((0, 3, 9)), rng.choice((0, 1, 5))
    return (
        "tokens",
        rng.choice(("batch", None)),
        rng.choice(("bounds", None)),
        "blocks",
        rng.choice(("columns", None)),
    )


def _common(draft: Draft, rng: Random, t: str, head_size: int, sizes: tuple[Dim, Dim, Dim, Dim, Dim]) -> None:
    tokens, batch, bounds, _, columns = sizes
    draft.inputs["cumulative_sequence_length"] = TensorSpec("int32", (bounds,))
    draft.inputs["past_seqlens"] = TensorSpec("int32", (batch,))
    draft.inputs["block_table"] = TensorSpec("int32", (batch, columns))
    if rng.random() < 0.3:
        draft.inputs["slot_mapping"] = TensorSpec("int32", (tokens,))
    if rng.random() < 0.3:
        draft.inputs["attention_metadata"] = TensorSpec("int32", (2,))
    if head_size % 16 == 0 and rng.random() < 0.5:
        width = 8 * rng.randint(0, head_size // 16)
        draft.inputs["cos_cache"] = draft.inputs["sin_cache"] = TensorSpec(
            t, (rng.choice(("rows", 64)), width)
        )
        draft.set("do_rotary", rng.choice((0, 1, 2)))
        draft.set("rotary_interleaved", rng.choice((0, 1)))
        draft.set("rotary_offset", 8 * rng.randint(0, (head_size - 2 * width) // 8))


def _latent(draft: Draft, rng: Random, t: str) -> None:
    heads = rng.choice((1, 4, 16, 64))
    head_size = rng.choice((64, 72, 192, 576))
    v_head_size = rng.choice((0, head_size, head_size // 2, 1))
    sizes = _sizes(rng)
    cache = rng.choice((t, t, "int8", "float8e4m3fn"))
    for name, value in (("num_heads", heads), ("kv_num_heads", 1), ("v_head_size", v_head_size)):
        draft.set(name, value)
    draft.set("kv_cache_layout", "LATENT")
    draft.set("scale", 0.125)
    if cache != t:
        draft.set("k_quant_type", rng.choice(("PER_TENSOR", "per_tensor")))
        draft.inputs["k_scale"] = TensorSpec("float32", rng.choice(((), (1,), (1, 1))))
    draft.inputs["query"] = TensorSpec(t, (sizes[0], heads * head_size))
    draft.inputs["key"] = TensorSpec(t, (sizes[0], head_size))
    draft.inputs["key_cache"] = TensorSpec(cache, (sizes[3], rng.choice((16, 64)), 1, head_size))
    _common(draft, rng, t, head_size, sizes)
    width = heads * (v_head_size or head_size)
    draft.outputs = [TensorSpec(t, (sizes[0], width)), draft.inputs["key_cache"]][: rng.randint(1, 2)]


def _separate(draft: Draft, rng: Random, t: str, int4: bool) -> None:
    kv_heads = rng.choice((1, 2, 3))
    heads = kv_heads * rng.choice((1, 2, 4))
    head_size = rng.choice((8, 16, 64, 80, 128))
    sizes = _sizes(rng)
    cache = rng.choice((t, t, "int8", "float8e4m3fn") + (("uint8",) if int4 else ()))
    draft.set("num_heads", heads)
    draft.set("kv_num_heads", kv_heads)
    if rng.random() < 0.3:
        draft.set("kv_cache_layout", "SEPARATE")
    if cache != t:
        _quantise(draft, rng, cache, kv_heads, head_size)
    packed = rng.random() < 0.4
    width = heads + 2 * kv_heads if packed else heads
    draft.inputs["query"] = TensorSpec(t, (sizes[0], width * head_size))
    if not packed:
        draft.inputs["key"] = draft.inputs["value"] = TensorSpec(t, (sizes[0], kv_heads * head_size))
    stored = (head_size + 1) // 2 if cache == "uint8" else head_size
    spec = TensorSpec(cache, (sizes[3], rng.choice((16, 256)), kv_heads, stored))
    draft.inputs["key_cache"] = draft.inputs["value_cache"] = spec
    _common(draft, rng, t, head_size, sizes)
    if rng.random() < 0.3:
        draft.inputs["q_norm_weight"] = draft.inputs["k_norm_weight"] = TensorSpec(t, (head_size,))
    output = TensorSpec(t, (sizes[0], heads * head_size))
    draft.outputs = [output] if rng.random() < 0.5 else [output, spec, spec]


def _quantise(draft: Draft, rng: Random, cache: str, kv_heads: int, head_size: int) -> None:
    for side in "kv":
        quant = rng.choice(("PER_TENSOR", "PER_CHANNEL", "per_channel"))
        draft.set(f"{side}_quant_type", quant)
        shape: tuple[int, ...] = (1,) if quant == "PER_TENSOR" else (kv_heads, 1, head_size)
        draft.inputs[f"{side}_scale"] = TensorSpec("float32", shape)
        if cache == "uint8":
            draft.set(f"{side}_cache_dtype", "int4")


Edit = Callable[[Draft, Random], None]
FAULTS: Final[dict[str, Edit]] = {}


def fault(name: str) -> Callable[[Edit], Edit]:
    """Register a named fault."""

    def register(edit: Edit) -> Edit:
        FAULTS[name] = edit
        return edit

    return register


def _retype(draft: Draft, name: str, dtype: str) -> None:
    spec = draft.inputs[name]
    if spec is not None:
        draft.inputs[name] = TensorSpec(dtype, spec.shape)


def _reshape(draft: Draft, name: str, shape: tuple[Dim, ...] | None) -> None:
    spec = draft.inputs[name]
    if spec is not None:
        draft.inputs[name] = TensorSpec(spec.dtype, shape)


@fault("attribute twice")
def _(d: Draft, r: Random) -> None:
    again = r.choice(d.attributes or [Attribute("num_heads", "INT", 1)])
    d.attributes += [again, again]


@fault("no num_heads")
def _(d: Draft, r: Random) -> None:
    d.drop("num_heads")


@fault("no kv_num_heads")
def _(d: Draft, r: Random) -> None:
    d.drop("kv_num_heads")


@fault("attribute of another kind")
def _(d: Draft, r: Random) -> None:
    name = r.choice(("num_heads", "kv_num_heads", "scale", "k_quant_type", "rotary_offset"))
    value, kind = r.choice(((1.5, "FLOAT"), (1, "INT"), ("1", "STRING")))
    d.set(name, value, kind)


@fault("unknown attribute")
def _(d: Draft, r: Random) -> None:
    name = r.choice(("qk_output", "smooth_softmax", "Num_heads"))
    d.attributes.insert(r.randint(0, len(d.attributes)), Attribute(name, "INT", 1))


@fault("nameless attribute")
def _(d: Draft, r: Random) -> None:
    d.attributes.insert(r.randint(0, len(d.attributes)), Attribute("", "INT", 1))


@fault("attribute without a kind")
def _(d: Draft, r: Random) -> None:
    d.set(r.choice(("num_heads", "softcap")), None, r.choice(("MALFORMED", "UNDEFINED")))


@fault("is_causal")
def _(d: Draft, r: Random) -> None:
    d.set("is_causal", r.choice((0, 1, 7)))


@fault("few input slots")
def _(d: Draft, r: Random) -> None:
    d.input_slots = r.choice((1, 7))


@fault("many input slots")
def _(d: Draft, r: Random) -> None:
    d.input_slots = r.choice((18, 25))


@fault("many output slots")
def _(d: Draft, r: Random) -> None:
    d.outputs = (d.outputs + [TensorSpec("bfloat16")] * 5)[: r.randint(4, 6)]


@fault("required input empty")
def _(d: Draft, r: Random) -> None:
    name = r.choice(("query", "key_cache", "cumulative_sequence_length", "past_seqlens", "block_table"))
    d.inputs[name] = None


@fault("output empty")
def _(d: Draft, r: Random) -> None:
    d.outputs = [None, *d.outputs[1:]]


@fault("foreign input type")
def _(d: Draft, r: Random) -> None:
    name = r.choice([name for name, spec in d.inputs.items() if spec is not None] or ["query"])
    _retype(
        d, name, r.choice(("float32", "int64", "int32", "float64", "bool", "uint8", "int8", "float8e5m2"))
    )


@fault("T of another input")
def _(d: Draft, r: Random) -> None:
    names = ("key", "value", "cos_cache", "sin_cache", "q_norm_weight")
    _retype(d, r.choice([name for name in names if d.inputs[name] is not None] or ["query"]), "float16")


@fault("caches of two types")
def _(d: Draft, r: Random) -> None:
    _retype(
        d, r.choice(("key_cache", "value_cache")), r.choice(("float16", "bfloat16", "int8", "float8e4m3fn"))
    )


@fault("uint8 caches")
def _(d: Draft, r: Random) -> None:
    _retype(d, "key_cache", "uint8")
    _retype(d, "value_cache", "uint8")


@fault("output type")
def _(d: Draft, r: Random) -> None:
    at = r.randrange(len(d.outputs)) if d.outputs else 0
    d.outputs[at : at + 1] = [TensorSpec(r.choice(("float16", "float32", "int8", "int64", "bfloat16")))]


@fault("layout")
def _(d: Draft, r: Random) -> None:
    d.set("kv_cache_layout", r.choice(("latent", "separate", "LATENT ", "", "PACKED")))


@fault("other layout")
def _(d: Draft, r: Random) -> None:
    d.set("kv_cache_layout", r.choice(("LATENT", "SEPARATE")))


@fault("query rank")
def _(d: Draft, r: Random) -> None:
    _reshape(d, "query", r.choice(((), (6,), (6, 512, 1), None)))


@fault("query width")
def _(d: Draft, r: Random) -> None:
    width: Dim = r.choice((0, 1, 7, 65, 512, 1 << 40, -1, "hidden", None))
    _reshape(d, "query", (r.choice(("tokens", 6)), width))


@fault("head counts")
def _(d: Draft, r: Random) -> None:
    counts = (0, -1, 1, 3, 5, 1 << 31, 1 << 32, (1 << 32) + 4, 1 << 62, (1 << 63) - 1, -(1 << 63))
    d.set(r.choice(("num_heads", "kv_num_heads")), r.choice(counts))


@fault("wrapping heads")
def _(d: Draft, r: Random) -> None:
    d.set("num_heads", r.choice((2, 4)))
    d.set("kv_num_heads", (1 << 63) - 1)


@fault("no value")
def _(d: Draft, r: Random) -> None:
    d.inputs["value"] = None


@fault("no key")
def _(d: Draft, r: Random) -> None:
    d.inputs["key"] = None


@fault("value")
def _(d: Draft, r: Random) -> None:
    d.inputs["value"] = d.inputs["key"] or d.inputs["query"]


@fault("v_head_size")
def _(d: Draft, r: Random) -> None:
    d.set("v_head_size", r.choice((-1, 1, 63, 64, 65, 577, 1 << 31, 1 << 62, -(1 << 63))))


@fault("output slots")
def _(d: Draft, r: Random) -> None:
    spec = d.inputs["key_cache"]
    more: list[list[TensorSpec | None]] = [
        [spec],
        [None],
        [spec, spec],
        [None, None],
        [spec, None],
        [None, spec],
        [],
    ]
    first = d.outputs[:1] or [TensorSpec("bfloat16")]
    d.outputs = first + r.choice(more)


@fault("value_cache absent")
def _(d: Draft, r: Random) -> None:
    d.inputs["value_cache"] = None


@fault("value_cache")
def _(d: Draft, r: Random) -> None:
    d.inputs["value_cache"] = d.inputs["key_cache"]


@fault("cache rank")
def _(d: Draft, r: Random) -> None:
    shape = r.choice((None, (), (9,), (9, 16, 2), (9, 16, 2, 64, 1)))
    _reshape(d, r.choice(("key_cache", "value_cache")), shape)


@fault("block size")
def _(d: Draft, r: Random) -> None:
    spec = d.inputs["key_cache"]
    if spec is not None and spec.shape is not None and len(spec.shape) == 4:
        _reshape(d, "key_cache", (spec.shape[0], r.choice((0, 1, 8, 15, 24, 48, 1 << 40)), *spec.shape[2:]))


@fault("cache tail")
def _(d: Draft, r: Random) -> None:
    name = r.choice(("key_cache", "value_cache"))
    spec = d.inputs[name]
    if spec is not None and spec.shape is not None and len(spec.shape) == 4:
        _reshape(d, name, (*spec.shape[:2], r.choice((1, 2, 7)), r.choice((8, 63, 64, 192))))


@fault("a shape")
def _(d: Draft, r: Random) -> None:
    name = r.choice([name for name, spec in d.inputs.items() if spec is not None] or ["query"])
    pool: tuple[Dim, ...] = (0, 1, 2, 3, 16, 64, 7, "n", None)
    _reshape(d, name, tuple(r.choice(pool) for _ in range(r.randint(0, 4))))


@fault("quant string")
def _(d: Draft, r: Random) -> None:
    name = r.choice(("k_quant_type", "v_quant_type", "k_cache_dtype", "v_cache_dtype"))
    d.set(name, r.choice(("BAD", "none", "Per_Tensor", "PER_CHANNEL", "int8", "INT4", "float4e2m1", "")))


@fault("epsilon")
def _(d: Draft, r: Random) -> None:
    d.set("qk_norm_epsilon", r.choice((0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e-3)))


@fault("scale")
def _(d: Draft, r: Random) -> None:
    d.set("scale", r.choice((0.0, -0.0, float("nan"), float("-inf"), 1e-60, 2.0)))


@fault("no scale")
def _(d: Draft, r: Random) -> None:
    d.drop("scale")


@fault("rotary")
def _(d: Draft, r: Random) -> None:
    d.set("rotary_offset", r.choice((-8, 4, 8, 1 << 20, 1 << 32)))


@fault("one rotary cache")
def _(d: Draft, r: Random) -> None:
    d.inputs[r.choice(("cos_cache", "sin_cache"))] = r.choice((None, TensorSpec("bfloat16", (4, 8))))


@fault("a sink, a scale, a norm")
def _(d: Draft, r: Random) -> None:
    name, dtype = r.choice((("head_sink", "bfloat16"), ("k_scale", "float32"), ("v_scale", "float32"),
                            ("k_norm_weight", "bfloat16")))  # fmt: skip
    d.inputs[name] = TensorSpec(dtype, r.choice(((), (1,), (4,), (64,), (1, 1, 64))))


@fault("metadata")
def _(d: Draft, r: Random) -> None:
    d.inputs["attention_metadata"] = TensorSpec(
        "int32", r.choice(((), (1,), (2,), (3,), (4,), (1, 2), ("m",)))
    )


def draw(
    rng: Random, faults: int, *, t: str = "bfloat16", int4: bool = True
) -> tuple[Declaration, tuple[str, ...]]:
    """Draw a valid node and put that many random faults into it; return it with the faults' names."""
    draft = valid(rng, t=t, int4=int4)
    names = tuple(rng.sample(sorted(FAULTS), faults))
    for name in names:
        FAULTS[name](draft, rng)
    return draft.declaration(), names


SIZES: Final = {
    "tokens": 6, "batch": 2, "bounds": 3, "blocks": 9, "columns": 4, "rows": 32, "hidden": 512, "n": 3,
    "m": 2,
}  # fmt: skip
"""Sizes for the symbols that this module draws."""


def concrete(rng: Random) -> Declaration:
    """Draw a node with up to two faults whose inputs have the sizes of one run, so that it can be run."""
    t = rng.choice(("bfloat16", "float16"))
    declaration, _ = draw(rng, rng.randint(0, 2), t=t)
    named = zip(INPUT_NAMES, declaration.inputs, strict=False)
    inputs = tuple(
        None if spec is None else TensorSpec(spec.dtype, _sized(name, spec)) for name, spec in named
    )
    outputs = tuple(None if spec is None else TensorSpec(spec.dtype) for spec in declaration.outputs)
    return Declaration(declaration.attributes, inputs + declaration.inputs[len(INPUT_NAMES) :], outputs)


def _sized(name: str, spec: TensorSpec) -> tuple[int, ...]:
    open_ = {"cumulative_sequence_length": (3,), "past_seqlens": (2,), "block_table": (2, 4)}
    if spec.shape is None:
        return (9, 16, 2, 64)
    whole = open_.get(name, ())
    if len(whole) == len(spec.shape) and not all(isinstance(dim, int) for dim in spec.shape):
        return whole
    sizes = (SIZES[dim] if isinstance(dim, str) else 2 if dim is None else dim for dim in spec.shape)
    return tuple(max(size, 0) for size in sizes)


def lengths(declaration: Declaration) -> dict[str, list[int]]:
    """Return values for the small integer inputs of a sized node: even steps, 3 cached tokens, no bounds."""
    shapes = {
        name: spec.shape
        for name, spec in zip(INPUT_NAMES, declaration.inputs, strict=False)
        if spec is not None and spec.shape is not None and _count(spec.shape) < 1000
    }
    tokens = known_size(shapes.get("query"))
    found = {}
    if "cumulative_sequence_length" in shapes:
        count = max(_count(shapes["cumulative_sequence_length"]), 1)
        found["cumulative_sequence_length"] = [tokens * index // max(count - 1, 1) for index in range(count)]
    if "past_seqlens" in shapes:
        found["past_seqlens"] = [3] * max(_count(shapes["past_seqlens"]), 1)
    if "attention_metadata" in shapes:
        found["attention_metadata"] = [0] * max(_count(shapes["attention_metadata"]), 1)
    return found


def known_size(shape: tuple[Dim, ...] | None) -> int:
    """Return the first dimension where it is a number, and 1 otherwise."""
    return shape[0] if shape and isinstance(shape[0], int) else 1


def _count(shape: tuple[Dim, ...]) -> int:
    return math.prod(dim if isinstance(dim, int) else 1 for dim in shape)
