"""How rows begin, shrink, branch and end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .admission import charges, future_need
from .authority import Authority, Result
from .block_table import PAD, SWAPPED
from .branch import fork
from .requirements import require_tenant, require_window
from .state import KVState
from .trim import advance_window, truncate
from .vectors import IntVector, as_count, as_lengths

Int64Array = npt.NDArray[np.int64]


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
            InvalidWindow, InvalidTenant, UnsupportedSink, InvalidLength: bad arguments.
        """
        state = self._enter()
        number = as_count(count, "count")
        require_window(window, sink)
        require_tenant(tenant)
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
