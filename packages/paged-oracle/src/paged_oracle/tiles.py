"""How query rows are cut into tiles, keys into chunks, and which keys a row sees.

Invariant: a chunk starts at a multiple of `KEY_CHUNK` counted from position 0 of its sequence, so that the
same row meets the same chunks however its prefill was split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from paged_schema import Call

from paged_oracle.dtypes import Array, Bool, Float64, Int64, upcast
from paged_oracle.product import ROWS
from paged_oracle.sequences import Sequences

KEY_CHUNK = 128
ROW_TILE = 1024


@dataclass(frozen=True, eq=False)
class Tile:
    """Consecutive new tokens of one sequence.

    Attributes:
        sequence: index in the batch.
        tokens: their rows of the query.
        first: position of the first of them.
        begin: first key position that any of them may see.
        end: one past the last.
        window: keys that a token sees to its left, itself included; -1 for all.
        causal: whether a token sees no later position.
    """

    sequence: int
    tokens: slice
    first: int
    begin: int
    end: int
    window: int
    causal: bool

    @property
    def count(self) -> int:
        """Number of tokens."""
        return int(self.tokens.stop - self.tokens.start)

    def chunks(self) -> Iterator[Int64]:
        """Yield the positions of each chunk, `KEY_CHUNK` at a time."""
        for start in range(self.begin - self.begin % KEY_CHUNK, self.end, KEY_CHUNK):
            yield np.arange(start, start + KEY_CHUNK)

    def visible(self, keys: Int64, mapped: Bool) -> Bool | None:
        """Return (tokens, keys) whether a token sees a key; None when all see all.

        Args:
            keys: the positions of a chunk, ascending.
            mapped: which of them are in a block.
        """
        last = self.first + self.count - 1
        bounded = keys[-1] >= (self.first + 1 if self.causal else self.end)
        windowed = self.window > 0 and keys[0] <= last - self.window
        if not bounded and not windowed and mapped.all():
            return None
        rows = np.arange(self.first, last + 1)[:, None]
        seen = mapped & (keys < self.end)
        if self.causal:
            seen = seen & (keys <= rows)
        if self.window > 0:
            seen = seen & (keys > rows - self.window)
        return np.broadcast_to(seen, (self.count, len(keys)))


def tiles(call: Call, sequences: Sequences) -> Iterator[Tile]:
    """Yield the tiles of all sequences: up to `ROW_TILE` rows, or to what the heads are padded to anyway."""
    step = max(ROW_TILE // call.num_heads, ROWS // call.group_size, 1)
    limit = sequences.block_table.shape[1] * sequences.block_size
    window = call.local_window_size
    for b in np.flatnonzero(sequences.lengths):
        start, length, past = (
            int(field[b]) for field in (sequences.starts, sequences.lengths, sequences.past)
        )
        for offset in range(0, length, step):
            count = min(step, length - offset)
            first = past + offset
            end = min(limit, first + count if call.causal else past + length)
            begin = max(0, first - window + 1) if window > 0 else 0
            tokens = slice(start + offset, start + offset + count)
            yield Tile(int(b), tokens, first, begin, end, window, call.causal)


def to_rows(call: Call, heads: Array) -> Float64:
    """Group query heads by KV head and pad.

    Args:
        call: the checked call.
        heads: (tokens, num_heads, head_size).

    Returns:
        (kv_num_heads, rows, head_size) float64: row ``token * group_size + head in group``, then zero rows.
    """
    tokens, group = heads.shape[0], call.group_size
    count = tokens * group
    rows = np.zeros((call.kv_num_heads, -(-count // ROWS) * ROWS, heads.shape[2]))
    grouped = upcast(heads).reshape(tokens, call.kv_num_heads, group, heads.shape[2])
    rows[:, :count] = grouped.swapaxes(0, 1).reshape(call.kv_num_heads, count, heads.shape[2])
    return rows


def from_rows(call: Call, tokens: int, rows: Float64) -> Float64:
    """Undo `to_rows` for (kv_num_heads, rows, ...) results: return (tokens, num_heads, ...)."""
    kept = rows[:, : tokens * call.group_size]
    grouped = kept.reshape(call.kv_num_heads, tokens, call.group_size, *rows.shape[2:])
    return grouped.swapaxes(0, 1).reshape(tokens, call.num_heads, *rows.shape[2:])


def mask_rows(call: Call, visible: Bool | None, rows: int) -> Bool | None:
    """Widen a (tokens, keys) mask to the rows of `to_rows`; the padding sees nothing."""
    if visible is None:
        return None
    mask = np.zeros((rows, visible.shape[1]), np.bool_)
    mask[: visible.shape[0] * call.group_size] = np.repeat(visible, call.group_size, axis=0)
    return mask
