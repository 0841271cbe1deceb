"""Named faults to put into a draft; each is a small edit.

Some do nothing on some nodes (a LATENT node has no value cache to remove). What the node then means is for
the rules, and for ORT, to say.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from paged_schema.declaration import Attribute
from paged_schema.inputs import Dim, TensorSpec
from paged_schema.testing.drafts import Draft

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
