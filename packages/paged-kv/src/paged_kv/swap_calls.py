"""The manager's calls around moving rows to the host and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .admission import charges
from .authority import Authority
from .block_pool import HELD, REF, PageChoice
from .block_table import PAD, RESIDENT, ROW_STATE_NAMES, SWAPPED, SWAPPING_IN, SWAPPING_OUT
from .errors import InvalidLength, SharedPageNotSwappable
from .outcomes import CapacityDeferred, UnserviceableRequest
from .requirements import require_resident
from .reserve import judge, promised_part
from .state import KVState
from .swap import SwapPlan
from .vectors import IntVector

Int64Array = npt.NDArray[np.int64]


class SwapCalls(Authority):
    """Preemption by swap."""

    def swap_out(self, rows: IntVector | int) -> SwapPlan | CapacityDeferred | UnserviceableRequest:
        """Plan to move rows to the host. They can be used again after `swap_in`.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest, PageNotResident, RowBusy: bad rows.
            SharedPageNotSwappable: others use a page of a row; preempt it by recompute instead.
        """
        state = self._enter()
        return self._apply_leave(_swap_out(state, self._rows(rows)))

    def swap_in(self, rows: IntVector | int) -> SwapPlan | CapacityDeferred | UnserviceableRequest:
        """Plan to bring swapped rows back; takes their device pages.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest, RowBusy: bad rows.
            InvalidLength: a row is not swapped out.
        """
        state = self._enter()
        return self._apply_leave(_swap_in(state, self._rows(rows)))

    def confirm_swap(self, plan: SwapPlan) -> None:
        """The copies are done, or are ordered before whatever comes next.

        Raises:
            SwapClosed, ForeignClaim: confirmed or cancelled before, or none of this manager's.
        """
        state = self._enter()
        state.require_own(plan)
        finish = _apply_left if plan.to_host else _apply_returned
        finish(state, plan, charges(state.table, plan.slots))

    def cancel_swap(self, plan: SwapPlan) -> None:
        """The copies were not made, or do not count: the rows are where they were.

        Raises:
            SwapClosed, ForeignClaim: confirmed or cancelled before, or none of this manager's.
        """
        state = self._enter()
        state.require_own(plan)
        cancel = _apply_cancel_out if plan.to_host else _apply_cancel_in
        cancel(state, plan, charges(state.table, plan.slots))


def _swap_out(state: KVState, slots: Int64Array) -> SwapPlan | CapacityDeferred | UnserviceableRequest:
    table, host = state.table, state.host
    state.require_idle(slots)
    require_resident(state, slots)
    counts = table.n_blocks[slots] - table.first_block[slots]
    pages = _pages_of(state, slots)
    shared = (state.pool.claims[pages] & HELD) != REF
    if shared.any():
        page = int(pages[int(shared.argmax())])
        raise SharedPageNotSwappable(
            f"page {page} is used by others too; preempt its row by recompute",
            page=page,
            shared=int(shared.sum()),
        )
    if len(pages) > host.num_pages:
        return UnserviceableRequest(len(pages), host.num_pages, "host_pages")
    if len(pages) > host.free.count:
        return CapacityDeferred(len(pages), host.free.count, host.free.count, "host_pages")
    host_pages, head = host.free.peek(len(pages))
    return _apply_swap_out(state, SwapPlan(table.handle[slots], slots, pages, host_pages, counts, True), head)


def _pages_of(state: KVState, slots: Int64Array) -> Int64Array:
    """Live pages of the rows, row by row, first column first."""
    table = state.table
    cells, _ = table.span(slots[::-1], table.first_block[slots[::-1]], table.n_blocks[slots[::-1]])
    return table.flat[cells[::-1]].astype(np.int64)


def _apply_swap_out(state: KVState, plan: SwapPlan, head: int) -> SwapPlan:
    table, host = state.table, state.host
    host.free.apply_take(len(plan.host_pages), head)
    host.apply_hold(plan)
    table.state[plan.slots] = SWAPPING_OUT
    table.apply_set_away(plan.slots)
    state.tally.swaps_out += len(plan.slots)
    state.open_swaps[id(plan)] = plan
    return plan


def _apply_finish(state: KVState, plan: SwapPlan) -> None:
    plan.is_open = False
    del state.open_swaps[id(plan)]


def _apply_left(state: KVState, plan: SwapPlan, charged: Int64Array) -> None:
    table, slots = state.table, plan.slots
    _apply_finish(state, plan)
    need = np.maximum(table.promised[slots] - table.n_blocks[slots], 0)
    for slot in slots:
        table.cells[slot, table.first_block[slot] : table.n_blocks[slot]] = PAD
    table.n_blocks[slots] = table.first_block[slots]
    table.state[slots] = SWAPPED
    table.apply_touch(slots)
    after = np.maximum(table.promised[slots] - table.n_blocks[slots], 0)
    state.ledger.outstanding += int((after - need).sum())
    state.ledger.apply_charge(table.tenant[slots], charges(table, slots) - charged)
    state.pool.apply_drop(plan.device_pages[::-1], state.epochs.fence)


def _apply_cancel_out(state: KVState, plan: SwapPlan, _: Int64Array) -> None:
    _apply_finish(state, plan)
    for slot in plan.slots:
        state.host.apply_give_back(int(slot))
    state.table.state[plan.slots] = RESIDENT
    state.table.ready[plan.slots] = plan.handles


def _swap_in(state: KVState, slots: Int64Array) -> SwapPlan | CapacityDeferred | UnserviceableRequest:
    table, pool = state.table, state.pool
    state.require_idle(slots)
    at_home = table.state[slots] != SWAPPED
    if at_home.any():
        row = int(slots[int(at_home.argmax())])
        raise InvalidLength(
            f"row {row} is {ROW_STATE_NAMES[int(table.state[row])]}, not swapped out", row=row
        )
    old = table.n_blocks[slots]
    blocks = (table.seq_len[slots] + state.geometry.block_size - 1) >> state.geometry.block_shift
    needed = int((blocks - old).sum())
    taken = promised_part(state, slots, old, blocks)
    refusal = judge(state, needed, taken)
    if refusal is not None:
        return refusal
    if state.ledger.quotas:
        after = np.maximum(table.promised[slots], blocks)
        over = state.ledger.batch_over_quota(table.tenant[slots], charges(table, slots), after)
        if over is not None:
            return over
    choice = pool.choose(needed)
    host_pages = [state.host.held[int(slot)] for slot in slots]
    moved = np.concatenate(host_pages) if host_pages else np.empty(0, dtype=np.int64)
    plan = SwapPlan(table.handle[slots], slots, choice.pages, moved, blocks - old, False)
    return _apply_swap_in(state, plan, choice, blocks, taken, charges(table, slots))


def _apply_swap_in(
    state: KVState, plan: SwapPlan, choice: PageChoice, blocks: Int64Array, taken: int, charged: Int64Array
) -> SwapPlan:
    table, slots = state.table, plan.slots
    state.apply_take(choice)
    start = 0
    for slot, count in zip(slots, plan.counts, strict=True):
        first = int(table.first_block[slot])
        table.cells[slot, first : first + count] = choice.pages[start : start + count]
        start += int(count)
    table.n_blocks[slots] = blocks
    table.state[slots] = SWAPPING_IN
    table.apply_touch(slots)
    state.ledger.outstanding -= taken
    state.ledger.apply_charge(table.tenant[slots], charges(table, slots) - charged)
    state.tally.swaps_in += len(slots)
    state.open_swaps[id(plan)] = plan
    return plan


def _apply_returned(state: KVState, plan: SwapPlan, _: Int64Array) -> None:
    _apply_finish(state, plan)
    for slot in plan.slots:
        state.host.apply_give_back(int(slot))
    state.table.state[plan.slots] = RESIDENT
    state.table.ready[plan.slots] = plan.handles


def _apply_cancel_in(state: KVState, plan: SwapPlan, charged: Int64Array) -> None:
    _apply_left(state, plan, charged)
