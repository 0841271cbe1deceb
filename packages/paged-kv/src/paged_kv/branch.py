"""Branching a row: the new rows share its pages, and whoever writes first gets a copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .admission import NO_TENANT, charges
from .errors import InvalidLength
from .requirements import require_held, require_one
from .state import KVState

Int64Array = npt.NDArray[np.int64]


def fork(state: KVState, slot: int, count: int, at: int | None) -> Int64Array:
    """Branch one row; see `KVCacheManager.fork`."""
    table = state.table
    require_one(state, slot)
    length = int(table.seq_len[slot])
    at = length if at is None else at
    if not 0 <= at <= length:
        raise InvalidLength(
            f"row {slot} has {length} tokens; it cannot fork at {at}", given=at, maximum=length
        )
    if table.num_advanced:
        require_held(state, np.array([slot]), np.array([at]))
    blocks = state.geometry.blocks_for(at)
    first = int(table.first_block[slot])
    pages = table.cells[slot, first:blocks].astype(np.int64)
    rows, head = table.choose_rows(count)
    new = rows.tolist()
    handles = [table.next_handle(row) for row in new]
    branch = Branch(slot, new, handles, at, first, blocks)
    return _apply_fork(state, branch, pages, head, np.array(handles, dtype=np.int64))


class Branch(NamedTuple):
    """A row, the rows that branch off, and the columns that they share."""

    slot: int
    new: list[int]
    handles: list[int]
    at: int
    first: int
    blocks: int


def _apply_fork(
    state: KVState, branch: Branch, pages: Int64Array, head: int, handles: Int64Array
) -> Int64Array:
    table, (slot, new, _, at, first, blocks) = state.table, branch
    window, tenant = int(table.window[slot]), int(table.tenant[slot])
    settled = min(at, int(table.settled[slot]))
    table.free.apply_take(len(new), head)
    for row, handle in zip(new, branch.handles, strict=True):
        table.apply_open_one(row, handle, window)
        table.cells[row, first:blocks] = table.cells[slot, first:blocks]
        table.seq_len[row] = at
        table.settled[row] = settled
        table.n_blocks[row] = blocks
        if first:
            table.first_block[row] = first
        if tenant != NO_TENANT:
            table.tenant[row] = tenant
    if at & (state.geometry.block_size - 1):
        table.tail_shared[[slot, *new]] = True
    if first:
        table.num_advanced += len(new)
    if tenant != NO_TENANT:
        state.ledger.apply_charge(table.tenant[new], charges(table, np.array(new, dtype=np.int64)))
    if new:
        state.pool.apply_share_live(pages, len(new))
    state.tally.forks += len(new)
    return handles
