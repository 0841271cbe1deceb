"""A PagedAttention node under edit, and seeded drafts that pass every rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

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
