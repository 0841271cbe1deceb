"""Calls of the operator as NumPy arrays, poisoned wherever nothing may be read.

Every cache row that no live position maps is NaN, unused table cells hold wild numbers, and outputs and
workspaces start as NaN, so whatever leaks in shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from paged_schema import PagedAttentionAttributes, PagedAttentionInputs, TensorSpec

Array = npt.NDArray[Any]
WILD = 2147480000
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


@dataclass(frozen=True)
class Case:
    """One batch. `q` and `past` are new tokens and cached lengths by sequence."""

    q: tuple[int, ...]
    past: tuple[int, ...]
    dtype: str = "bfloat16"
    heads: int = 16
    head_size: int = 576
    v_head_size: int = 512
    block_size: int = 64
    rotary_dim: int = 64
    rotary_offset: int | None = None
    interleaved: bool = False
    scale: float | None = 192**-0.5
    softcap: float = 0.0
    window: int = -1
    causal: bool = True
    slots: bool = False
    skipped: tuple[int, ...] = ()
    holes: tuple[tuple[int, int], ...] = ()
    spare_blocks: int = 2
    spare_columns: int = 1
    spread: float = 1.0
    seed: int = 0

    @property
    def offset(self) -> int:
        """First rotated channel: by default the row's last ones."""
        if self.rotary_dim == 0:
            return 0
        return self.head_size - self.rotary_dim if self.rotary_offset is None else self.rotary_offset


@dataclass(frozen=True)
class Problem:
    """Attributes and arrays of one call."""

    case: Case
    attributes: PagedAttentionAttributes
    inputs: dict[str, Array]
    extra: dict[str, Any] = field(default_factory=dict)

    def changed(self, **inputs: Array | None) -> Problem:
        """Return the same call with some inputs replaced."""
        merged = {**self.inputs, **inputs}
        return replace(self, inputs={name: array for name, array in merged.items() if array is not None})


def attributes_of(case: Case) -> PagedAttentionAttributes:
    """Return the node's attributes."""
    optional: dict[str, Any] = {}
    if case.scale is not None:
        optional["scale"] = case.scale
    if case.softcap:
        optional["softcap"] = case.softcap
    if not case.causal:
        optional["is_causal"] = 0
    return PagedAttentionAttributes(
        num_heads=case.heads,
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=case.v_head_size,
        do_rotary=int(case.rotary_dim > 0),
        rotary_interleaved=int(case.interleaved),
        rotary_offset=case.offset,
        local_window_size=case.window,
        **optional,
    )


def specs_of(inputs: dict[str, Array], *, symbolic: bool = True) -> PagedAttentionInputs:
    """Return the inputs' types and shapes; extents that a step may change are symbolic."""
    free = {
        "query": (0,),
        "key": (0,),
        "key_cache": (0,),
        "cumulative_sequence_length": (0,),
        "past_seqlens": (0,),
        "block_table": (0, 1),
        "slot_mapping": (0,),
        "cos_cache": (0,),
        "sin_cache": (0,),
    }
    specs = {}
    for name, array in inputs.items():
        shape: list[int | str | None] = list(array.shape)
        if symbolic:
            for axis in free[name]:
                shape[axis] = None
        specs[name] = TensorSpec(dtype=array.dtype.name, shape=tuple(shape))
    return PagedAttentionInputs(**specs)


def build(case: Case) -> Problem:
    """Draw the arrays of `case` from its seed."""
    rng = np.random.default_rng(case.seed)
    dtype = DTYPES[case.dtype]
    tokens, totals = sum(case.q), [q + past for q, past in zip(case.q, case.past, strict=True)]
    pages = [-(-total // case.block_size) for total in totals]
    num_blocks = max(1, sum(pages) + case.spare_blocks)

    def normal(*shape: int, spread: float = 1.0) -> Array:
        return (spread * rng.standard_normal(shape, np.float32)).astype(dtype)

    order = iter(rng.permutation(num_blocks))
    table = np.full((len(case.q), max([1, *pages]) + case.spare_columns), WILD, np.int32)
    cache = np.full((num_blocks, case.block_size, 1, case.head_size), np.nan, np.float32).astype(dtype)
    for sequence, total in enumerate(totals):
        for column in range(pages[sequence]):
            block = next(order)
            table[sequence, column] = block
            rows = min(case.block_size, total - column * case.block_size)
            cache[block, :rows] = normal(rows, 1, case.head_size)
    inputs: dict[str, Array] = {
        "query": normal(tokens, case.heads * case.head_size, spread=case.spread),
        "key": normal(tokens, case.head_size),
        "key_cache": cache,
        "cumulative_sequence_length": np.concatenate([[0], np.cumsum(case.q)]).astype(np.int32),
        "past_seqlens": np.array(case.past, np.int32),
        "block_table": table,
    }
    if case.slots:
        inputs["slot_mapping"] = _slots(case, table)
    if case.rotary_dim:
        angles = np.arange(max([1, *totals]))[:, None] * 10000.0 ** (
            -np.arange(0, case.rotary_dim, 2) / case.rotary_dim
        )
        inputs["cos_cache"] = np.cos(angles).astype(np.float32).astype(dtype)
        inputs["sin_cache"] = np.sin(angles).astype(np.float32).astype(dtype)
    for sequence, column in case.holes:
        table[sequence, column] = -1
    return Problem(case, attributes_of(case), inputs)


def _slots(case: Case, table: Array) -> Array:
    slots = [
        int(table[sequence, position // case.block_size]) * case.block_size + position % case.block_size
        for sequence, (q, past) in enumerate(zip(case.q, case.past, strict=True))
        for position in range(past, past + q)
    ]
    for token in case.skipped:
        slots[token] = -1
    return np.array(slots, np.int32)
