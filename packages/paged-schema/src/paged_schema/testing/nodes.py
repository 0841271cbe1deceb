"""Seeded PagedAttention nodes with any number of faults, open or with the sizes of one run."""

from __future__ import annotations

import math
from random import Random
from typing import Final

from paged_schema.declaration import Declaration
from paged_schema.inputs import INPUT_NAMES, Dim, TensorSpec
from paged_schema.testing.drafts import valid
from paged_schema.testing.faults import FAULTS


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
