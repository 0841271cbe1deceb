"""How rows begin, shrink, branch and end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .admission import NO_TENANT, charges, future_need
from .authority import Authority, Result
from .block_pool import HELD, REF
from .block_table import PAD, RESIDENT, SWAPPED
from .errors import InvalidLength, InvalidWindow, PageNotResident, PositionEvicted, UnsupportedSink
from .state import KVState
from .vectors import IntVector, as_count, as_lengths

Int64Array = npt.NDArray[np.int64]


def require_window(window: int, sink: int) -> None:
    """Refuse windows and sinks that the table cannot express.

    Raises:
        InvalidWindow: negative.
        UnsupportedSink: any sink.
    """
    if window < 0:
        raise InvalidWindow(f"window is {window}; it must be 0 (none) or positive", window=window)
    if sink:
        raise UnsupportedSink(f"sink is {sink}; attention sinks are not supported, it must be 0", sink=sink)


def require_resident(state: KVState, slots: Int64Array) -> None:
    """Refuse rows that are on the host.

    Raises:
        PageNotResident: with the first such row.
    """
    away = state.table.state[slots] == SWAPPED
    if away.any():
        row = int(slots[np.flatnonzero(away)[0]])
        raise PageNotResident(f"row {row} is swapped out; swap it in first", row=row)


def require_one(state: KVState, slot: int) -> None:
    """As `require_idle` and `require_resident`, for one row."""
    if state.step is not None or state.table.state[slot] != RESIDENT:
        slots = np.array([slot])
        state.require_idle(slots)
        require_resident(state, slots)


def create(state: KVState, count: int, window: int, tenant: str | None) -> Int64Array:
    """Open empty rows; see `KVCacheManager.create`."""
    slots, head = state.table.choose_rows(count)
    handles = state.table.next_handles(slots)
    return _apply_create(state, slots, head, handles, window, tenant)


def _apply_create(
    state: KVState, slots: Int64Array, head: int, handles: Int64Array, window: int, tenant: str | None
) -> Int64Array:
    state.ledger.apply_know(tenant)
    state.table.apply_open(slots, head, handles, window)
    state.table.tenant[slots] = state.ledger.tenant_number(tenant)
    return handles


def release(state: KVState, slots: Int64Array, result: Result, *, preempted: bool = False) -> Result:
    """End rows and return `result`; see `KVCacheManager.release`."""
    state.require_idle(slots)
    table = state.table
    _, pages = state.take_back(slots, table.first_block[slots], table.n_blocks[slots])
    need = int(future_need(table, slots).sum())
    gone = Departure(pages, need, charges(table, slots), preempted)
    return _apply_release(state, slots, gone, result)


class Departure(NamedTuple):
    """What rows leave behind: pages, promises and charges; and whether they gave way or are done."""

    pages: Int64Array
    promised: int
    charged: Int64Array
    preempted: bool


def _apply_release(state: KVState, slots: Int64Array, gone: Departure, result: Result) -> Result:
    table = state.table
    state.ledger.outstanding -= gone.promised
    state.ledger.apply_charge(table.tenant[slots], -gone.charged)
    for slot in slots[table.state[slots] == SWAPPED]:
        state.host.apply_give_back(int(slot))
    _apply_clear(state, slots)
    state.pool.apply_drop(gone.pages, state.epochs.fence)
    table.apply_close(slots)
    if gone.preempted:
        state.tally.preemptions += len(slots)
    else:
        state.tally.releases += len(slots)
    return result


def _apply_clear(state: KVState, slots: Int64Array) -> None:
    """Pad the rows' live cells; the widest of them bounds the work."""
    width = int(state.table.n_blocks[slots].max()) if len(slots) else 0
    if width:
        state.table.cells[slots, :width] = PAD


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
        _require_held(state, slots, lengths)
    blocks = (lengths + state.geometry.block_size - 1) >> shift
    old = table.n_blocks[slots]
    cells, pages = state.take_back(slots, blocks, old)
    before, charged = future_need(table, slots), charges(table, slots)
    promised = _kept_promise(state, slots, blocks, old)
    need = int((np.maximum(promised - blocks, 0) - before).sum())
    _apply_truncate(state, slots, lengths, blocks, promised, cells, pages, need, charged)


def _require_held(state: KVState, slots: Int64Array, lengths: Int64Array) -> None:
    """A row that gave up pages must still hold the whole window in front of its new end."""
    table = state.table
    first = table.first_block[slots] << state.geometry.block_shift
    lost = (first > 0) & (first > lengths - table.window[slots])
    if lost.any():
        index = int(np.flatnonzero(lost)[0])
        raise PositionEvicted(
            f"row {int(slots[index])} holds positions from {int(first[index])} on; at length "
            f"{int(lengths[index])} its window of {int(table.window[slots[index]])} would reach before them",
            row=int(slots[index]),
            first=int(first[index]),
            given=int(lengths[index]),
        )


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
    table.cut[slots] += 1
    table.tail_shared[slots] = (lengths & (state.geometry.block_size - 1)) > 0
    table.n_blocks[slots] = blocks
    table.promised[slots] = promised
    table.flat[cells] = PAD
    table.apply_touch(slots)
    state.pool.apply_drop(pages, state.epochs.fence)
    state.ledger.outstanding += need
    state.ledger.apply_charge(table.tenant[slots], charges(table, slots) - charged)


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
        _require_held(state, np.array([slot]), np.array([at]))
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
        state.ledger.apply_charge(table.tenant[new], charges(table, np.array(new)))
    if new:
        state.pool.apply_share_live(pages, len(new))
    state.tally.forks += len(new)
    return handles


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


class LifecycleCalls(Authority):
    """Create, shorten, branch and release rows."""

    def create(
        self, count: int = 1, *, window: int = 0, sink: int = 0, tenant: str | None = None
    ) -> Int64Array:
        """Open `count` empty sequences without any promise of pages.

        Args:
            count: how many.
            window: sliding window in tokens; 0 for none.
            sink: attention sinks are not supported; must be 0.
            tenant: whose quota the rows count for.

        Returns:
            ``(count,)`` int64 handles.

        Raises:
            NoFreeRow: fewer rows are free.
            InvalidWindow, UnsupportedSink, InvalidLength: bad arguments.
        """
        state = self._enter()
        number = as_count(count, "count")
        require_window(window, sink)
        return create(state, number, window, tenant)

    def release(self, rows: IntVector | int) -> None:
        """End sequences. Their pages wait for the steps in flight; registered ones stay as cached content.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest: bad rows; a second release is stale.
            RowBusy: a row belongs to an open step or swap.
        """
        release(self._enter(), self._rows(rows), None)

    def truncate(self, rows: IntVector | int, lengths: IntVector | int) -> None:
        """Shorten each row to `lengths[i]` tokens and give back the pages wholly above.

        A registered page that is then only partly below the length stays registered until it is written to:
        the next step copies it or, when the row has it alone, takes back its registration.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest, PageNotResident, RowBusy: bad rows.
            InvalidLength: longer than the row.
            PositionEvicted: the window before the new end reaches pages that were given up.
        """
        state = self._enter()
        slots = self._rows(rows)
        truncate(state, slots, as_lengths(lengths, len(slots), "lengths"))

    def fork(self, row: int | np.integer, count: int = 1, *, at: int | None = None) -> Int64Array:
        """Open `count` rows that share the first `at` tokens of `row`, its partly filled last page included.

        No page is taken: the first write to a shared page is a copy (`StepTransaction.copies`). Forked rows
        have no promise.

        Returns:
            ``(count,)`` int64 handles.

        Raises:
            UnknownSequence, StaleSequenceHandle, PageNotResident, RowBusy: bad row.
            NoFreeRow: fewer rows are free.
            InvalidLength: `at` lies beyond the row.
            PositionEvicted: the window before `at` reaches pages that were given up.
        """
        state = self._enter()
        number = as_count(count, "count")
        point = None if at is None else as_count(at, "at")
        return fork(state, state.table.resolve_one(row), number, point)

    def advance_window(self, rows: IntVector | int) -> int:
        """Give back whole pages in front of each row's window, as far as the device is done with the tokens.

        Keeps every position from ``settled - window`` on; what is written but not completed does not count.

        Returns:
            Pages given back.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest, PageNotResident, RowBusy: bad rows.
            InvalidWindow: a row has no window.
        """
        state = self._enter()
        return advance_window(state, self._rows(rows))
