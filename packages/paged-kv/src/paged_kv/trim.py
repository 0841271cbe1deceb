"""Taking tokens off a row: from its end, or in front of its window."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .admission import charges, future_need
from .block_pool import HELD, REF
from .block_table import PAD
from .errors import InvalidLength, InvalidWindow
from .requirements import require_held, require_resident
from .state import KVState

Int64Array = npt.NDArray[np.int64]


def truncate(state: KVState, slots: Int64Array, lengths: Int64Array) -> None:
    """Shorten rows; see `KVCacheManager.truncate`."""
    state.require_idle(slots)
    require_resident(state, slots)
    table, shift = state.table, state.geometry.block_shift
    above = lengths > table.seq_len[slots]
    if above.any():
        index = int(np.flatnonzero(above)[0])
        row, length = int(slots[index]), int(lengths[index])
        raise InvalidLength(
            f"row {row} has {int(table.seq_len[slots[index]])} tokens; it cannot be truncated to {length}",
            row=row,
            given=length,
            maximum=int(table.seq_len[slots[index]]),
        )
    if table.num_advanced:
        require_held(state, slots, lengths)
    blocks = (lengths + state.geometry.block_size - 1) >> shift
    old = table.n_blocks[slots]
    cells, pages = state.take_back(slots, blocks, old)
    before, charged = future_need(table, slots), charges(table, slots)
    promised = _kept_promise(state, slots, blocks, old)
    need = int((np.maximum(promised - blocks, 0) - before).sum())
    _apply_truncate(state, slots, lengths, blocks, promised, cells, pages, need, charged)


def _kept_promise(state: KVState, slots: Int64Array, blocks: Int64Array, old: Int64Array) -> Int64Array:
    """A promise covers again only those given-up pages that become free; shared ones stay with others."""
    table = state.table
    promised = table.promised[slots]
    if not promised.any():
        return promised
    cells, batch = table.span(slots, blocks, old)
    alone = (state.pool.claims[table.flat[cells]] & HELD) == REF
    stay = np.bincount(batch[~alone], minlength=len(slots))
    return np.asarray(np.maximum(promised - stay, 0), dtype=np.int64)


def _apply_truncate(
    state: KVState,
    slots: Int64Array,
    lengths: Int64Array,
    blocks: Int64Array,
    promised: Int64Array,
    cells: Int64Array,
    pages: Int64Array,
    need: int,
    charged: Int64Array,
) -> None:
    table = state.table
    table.seq_len[slots] = lengths
    table.settled[slots] = np.minimum(table.settled[slots], lengths)
    table.tail_shared[slots] = (lengths & (state.geometry.block_size - 1)) > 0
    table.n_blocks[slots] = blocks
    table.promised[slots] = promised
    table.flat[cells] = PAD
    table.apply_touch(slots)
    table.cut[slots] = table.last_version
    state.pool.apply_drop(pages, state.epochs.fence)
    state.ledger.outstanding += need
    state.ledger.apply_charge(table.tenant[slots], charges(table, slots) - charged)


def advance_window(state: KVState, slots: Int64Array) -> int:
    """Give up pages in front of the window; see `KVCacheManager.advance_window`."""
    state.require_idle(slots)
    require_resident(state, slots)
    table = state.table
    window = table.window[slots]
    if not window.all():
        row = int(slots[np.flatnonzero(window == 0)[0]])
        raise InvalidWindow(f"row {row} has no window; create it with one", row=row)
    old = table.first_block[slots]
    first = np.maximum(old, np.maximum(table.settled[slots] - window, 0) >> state.geometry.block_shift)
    cells, pages = state.take_back(slots, old, first)
    moved = slots[first > old]
    started = int(np.count_nonzero((old == 0) & (first > 0)))
    return _apply_advance(state, slots, first, started, cells, pages, moved)


def _apply_advance(
    state: KVState,
    slots: Int64Array,
    first: Int64Array,
    started: int,
    cells: Int64Array,
    pages: Int64Array,
    moved: Int64Array,
) -> int:
    table = state.table
    table.first_block[slots] = first
    table.num_advanced += started
    table.flat[cells] = PAD
    table.apply_touch(moved)
    state.pool.apply_drop(pages, state.epochs.fence)
    return len(pages)
