"""Calls that must give the same numbers: repaged, alone, or in pieces.

Invariant: what a sequence holds at its positions is the same in the case given and in the case returned.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paged_oracle.dtypes import Array
from paged_oracle.testing.cases import Case

_CACHES = ("key_cache", "value_cache")
_TOKEN_INPUTS = ("query", "key", "value", "slot_mapping")


def repaged(case: Case, block_size: int, seed: int) -> Case:
    """Move every cached token to a new block of another size; what no sequence holds becomes noise.

    Args:
        case: a case without slot_mapping.
        block_size: of the new caches.
        seed: of the new places and the noise.
    """
    rng = np.random.default_rng(seed)
    inputs = case.fresh()
    past = inputs["past_seqlens"]
    contexts = past + np.diff(inputs["cumulative_sequence_length"])
    needed = -(-contexts // block_size)
    num_blocks = int(needed.sum()) + 1
    order = rng.permutation(num_blocks)
    table = np.full((len(past), max(1, int(needed.max()))), -1, np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum(needed) - needed, needed, strict=True)):
        table[row, :count] = order[first : first + count]
    inputs["block_table"] = table
    for name in _CACHES:
        if name in inputs:
            old = inputs[name]
            noise = rng.integers(0, 100, (num_blocks, block_size, *old.shape[2:], old.itemsize), np.uint8)
            new = noise.view(old.dtype)[..., 0]
            for row, length in enumerate(past):
                new[place(table[row], length, block_size)] = old[
                    place(case.inputs["block_table"][row], length, old.shape[1])
                ]
            inputs[name] = new
    return Case(case.attributes, inputs, case.extensions)


def place(blocks: Array, length: int, block_size: int) -> tuple[Array, Array]:
    """Return (block, offset) of the first `length` positions of a block table's row."""
    positions = np.arange(length)
    return blocks[positions // block_size], positions % block_size


def alone(case: Case, sequence: int) -> tuple[Case, slice]:
    """Return the call of one sequence, and its rows in the whole call."""
    inputs = case.fresh()
    bounds = inputs["cumulative_sequence_length"]
    rows = slice(int(bounds[sequence]), int(bounds[sequence + 1]))
    for name in _TOKEN_INPUTS:
        if name in inputs:
            inputs[name] = inputs[name][rows]
    inputs["cumulative_sequence_length"] = np.array([0, rows.stop - rows.start], np.int32)
    inputs["past_seqlens"] = inputs["past_seqlens"][sequence : sequence + 1]
    inputs["block_table"] = inputs["block_table"][sequence : sequence + 1]
    return Case(case.attributes, inputs, case.extensions), rows


def pieces(case: Case, lengths: list[int]) -> Iterator[dict[str, Array]]:
    """Yield the calls that append one sequence's new tokens piece by piece, on the same caches.

    Args:
        case: a case of one sequence.
        lengths: tokens of each piece, as many as the case has in all.
    """
    inputs = case.fresh()
    start = 0
    for length in lengths:
        piece = dict(inputs)
        for name in _TOKEN_INPUTS:
            if name in inputs:
                piece[name] = inputs[name][start : start + length]
        piece["cumulative_sequence_length"] = np.array([0, length], np.int32)
        piece["past_seqlens"] = inputs["past_seqlens"] + np.int32(start)
        yield piece
        start += length
