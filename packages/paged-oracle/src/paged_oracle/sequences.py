"""Which sequence and position each token has, and which slot it writes.

Invariant: every index that leaves this module is in range. What ONNX Runtime leaves undefined is decided
here:

* cumulative lengths are clamped to [0, tokens] and made non-decreasing; a token of no sequence is idle;
* a sequence with a negative past is idle;
* a token whose position has no row in both rotary tables is idle;
* a block id outside [0, num_blocks) is unmapped; a position past the table's width is unmapped;
* a slot outside [0, num_blocks * block_size) is not written.

An idle token writes nothing, and its output is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged_oracle.dtypes import Array, Bool, Int64
from paged_oracle.resolve import BoundCall


@dataclass(frozen=True, eq=False)
class Sequences:
    """The ragged batch of one call.

    Attributes:
        starts: (batch,) first token of each sequence.
        lengths: (batch,) new tokens of each sequence; 0 when idle.
        past: (batch,) cached tokens before them.
        block_table: (batch, max_blocks) physical block of each logical block; -1 when unmapped.
        num_blocks: blocks of the cache.
        block_size: tokens a block.
        sequence: (tokens,) the sequence of each token; -1 when it has none.
        positions: (tokens,) absolute position of each token; 0 when idle.
        idle: (tokens,) tokens that write nothing and whose output is zero.
    """

    starts: Int64
    lengths: Int64
    past: Int64
    block_table: Int64
    num_blocks: int
    block_size: int
    sequence: Int64
    positions: Int64
    idle: Bool

    @classmethod
    def build(cls, bound: BoundCall) -> Sequences:
        """Read the index tensors of a call and make every index safe."""
        arrays, tokens = bound.arrays, bound.tokens
        bounds = token_bounds(arrays["cumulative_sequence_length"], tokens)
        past = arrays["past_seqlens"].astype(np.int64)
        lengths = np.where(past < 0, 0, np.diff(bounds))
        table = arrays["block_table"].astype(np.int64)
        table = np.where((table >= 0) & (table < bound.num_blocks), table, -1)

        sequence = np.full(tokens, -1, np.int64)
        positions = np.zeros(tokens, np.int64)
        for b in np.flatnonzero(lengths):
            rows = slice(bounds[b], bounds[b] + lengths[b])
            sequence[rows] = b
            positions[rows] = past[b] + np.arange(lengths[b])
        idle = sequence < 0
        if bound.call.rotary:
            idle |= positions >= bound.rotary_rows
            positions[idle] = 0
        return cls(
            bounds[:-1], lengths, past, table, bound.num_blocks, bound.block_size, sequence, positions, idle
        )

    def place(self, sequence: int | Int64, positions: Int64) -> tuple[Int64, Int64]:
        """Return (block, offset in block) of each position; the block is -1 where nothing is mapped."""
        logical = positions // self.block_size
        width = self.block_table.shape[1]
        if width == 0:
            return np.full(positions.shape, -1, np.int64), positions % self.block_size
        block = self.block_table[sequence, np.minimum(logical, width - 1)]
        return np.where(logical < width, block, -1), positions % self.block_size

    def write_slots(self, slot_mapping: Array | None) -> Int64:
        """Return the flat slot that each token writes, -1 for none: given, or derived from the table."""
        if slot_mapping is None:
            block, offset = self.place(self.sequence, self.positions)
            slots = np.where(block < 0, -1, block * self.block_size + offset)
        else:
            slots = slot_mapping.astype(np.int64)
            slots = np.where((slots >= 0) & (slots < self.num_blocks * self.block_size), slots, -1)
        return np.where(self.idle, -1, slots)


def token_bounds(cumulative: Array, tokens: int) -> Int64:
    """Return (batch + 1,) the cumulative lengths, clamped to [0, tokens] and made non-decreasing."""
    return np.maximum.accumulate(np.clip(cumulative.astype(np.int64), 0, tokens))
