"""Reserving a step: one judgement of the whole batch's need, then tables and references at once.

Nothing is written before everything that can be refused or can fail is behind. The need is the new pages of
every row and the copies of partly filled pages that others can read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .admission import charges
from .block_pool import HASHED, HELD, PIN, REF, REF_MASK, PageChoice
from .block_table import ROW_STATE_NAMES, SLOT_MASK, BlockTable
from .copy_plan import CopyPlan
from .errors import PageNotResident, StepOpen
from .outcomes import CapacityDeferred, UnserviceableRequest
from .state import KVState, RecentBatch
from .step import SharedWrites, StepTransaction
from .vectors import QueryLengths

if TYPE_CHECKING:
    from .step_calls import StepCalls

Int64Array = npt.NDArray[np.int64]
EMPTY: Int64Array = np.empty(0, dtype=np.int64)
NO_PAGES = PageChoice(EMPTY, 0, -1, -1)
NO_SHARED_WRITES = SharedWrites(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)


def reserve(
    manager: StepCalls, state: KVState, handles: Int64Array, lengths: QueryLengths
) -> StepTransaction | CapacityDeferred | UnserviceableRequest:
    """Judge the batch and take its pages; see `KVCacheManager.begin_step`."""
    table, pool, ledger = state.table, state.pool, state.ledger
    if state.step is not None:
        raise StepOpen(
            f"step {state.step.epoch} is still open; commit it or roll it back", epoch=state.step.epoch
        )
    slots = _batch_rows(state, handles)
    query = lengths.values
    past = table.seq_len[slots]
    new_lens = past + query
    new_lens.flags.writeable = False  # what `complete` settles, long after the caller had it
    shift, mask = state.geometry.block_shift, state.geometry.block_size - 1
    new_blocks = (new_lens + mask) >> shift
    old_blocks = table.n_blocks[slots]
    most, least = (int(new_lens.max()), int(new_lens.min())) if len(slots) else (0, 0)
    widest = state.geometry.blocks_for(most)
    if widest > pool.num_usable:
        return UnserviceableRequest(widest, pool.num_usable, "pages")
    if widest > table.num_columns:
        return UnserviceableRequest(widest, table.num_columns, "columns")
    grown = (new_blocks != old_blocks).nonzero()[0]
    growth = new_blocks[grown] - old_blocks[grown]
    num_new = int(growth.sum()) if len(grown) else 0
    shared = _shared_writes(state, slots, past, query)
    needed = num_new + len(shared.cells)
    promised = promised_part(state, slots, old_blocks, new_blocks)
    refusal = judge(state, needed, promised)
    if refusal is not None:
        return refusal
    charged = None
    if ledger.names:
        before, after = charges(table, slots), np.maximum(table.promised[slots], new_blocks)
        over = ledger.batch_over_quota(table.tenant[slots], before, after)
        if over is not None:
            return over
        charged = after - before
    grown_rows = slots[grown]
    choice = pool.choose(needed) if needed else NO_PAGES
    step = StepTransaction(
        manager=manager,
        epoch=state.epochs.begun + 1,
        handles=handles,
        slots=slots,
        query_lens=query,
        past_lens=past,
        new_lens=new_lens,
        num_tokens=lengths.total,
        longest=lengths.longest,
        most=most,
        least=least,
        old_blocks=old_blocks,
        new_blocks=new_blocks,
        grown=grown,
        grown_rows=grown_rows,
        grown_cells=_grown_cells(table, grown_rows, old_blocks[grown], growth, num_new) if num_new else EMPTY,
        choice=choice,
        shared=shared,
        copies=_copy_plan(shared, choice.pages[num_new:], past, mask),
        charged=charged,
        promised_taken=promised,
        launched_before=state.epochs.launched,
    )
    return _apply_reserve(state, step)


def _batch_rows(state: KVState, handles: Int64Array) -> Int64Array:
    """Row numbers of the batch; free when it is the last batch again and no row has gone away since."""
    table, recent = state.table, state.recent
    if (
        recent.departures == table.departures
        and len(recent.handles) == len(handles)
        and np.count_nonzero(recent.handles == handles) == len(handles)
    ):
        return recent.slots
    slots = _ready_rows(table, handles)
    table.require_distinct(slots)
    handles.flags.writeable = False  # the next batch is compared with this one
    slots.flags.writeable = False  # plans and buffers know a batch by this very array
    state.recent = RecentBatch(handles, slots, table.departures)
    return slots


def _ready_rows(table: BlockTable, handles: Int64Array) -> Int64Array:
    slots = handles & SLOT_MASK
    ready = (table.ready.take(slots, mode="clip") == handles) & (handles >= 0)
    if np.count_nonzero(ready) == len(handles):
        return slots
    table.resolve(handles)
    row = int(slots[np.flatnonzero(~ready)[0]])
    name = ROW_STATE_NAMES[int(table.state[row])]
    raise PageNotResident(f"row {row} is {name}; swap it in and confirm first", row=row, state=name)


def promised_part(state: KVState, slots: Int64Array, old: Int64Array, new: Int64Array) -> int:
    """How many of the blocks between `old` and `new` were promised to their rows."""
    if not state.ledger.outstanding:
        return 0
    promised = state.table.promised[slots]
    return int((np.maximum(promised - old, 0) - np.maximum(promised - new, 0)).sum())


def judge(state: KVState, needed: int, promised: int) -> CapacityDeferred | UnserviceableRequest | None:
    """Whether `needed` pages can be taken now, `promised` of them from promises; None when they can."""
    available, extra = state.pool.num_available, needed - promised
    free_for_all = available - state.ledger.outstanding
    if needed <= available and (extra == 0 or extra <= free_for_all):
        return None
    if needed > state.pool.num_usable:
        return UnserviceableRequest(needed, state.pool.num_usable, "pages")
    room = min(available, max(0, free_for_all) + promised)
    return CapacityDeferred(needed, room, room + state.pool.num_fenced, "pages")


def _shared_writes(state: KVState, slots: Int64Array, past: Int64Array, query: Int64Array) -> SharedWrites:
    """Partly filled pages that this step writes to and that are not the writer's alone."""
    table, pool = state.table, state.pool
    marked = table.tail_shared.take(slots)
    if not np.count_nonzero(marked):
        return NO_SHARED_WRITES
    partial = past & (state.geometry.block_size - 1)
    writers_at = np.flatnonzero(marked & (query > 0) & (partial > 0))
    cells = slots * table.num_columns + (past >> state.geometry.block_shift)
    pages = table.flat.take(cells, mode="clip")
    batch = writers_at[pool.claims[pages[writers_at]] != REF]
    if not len(batch):
        return NO_SHARED_WRITES._replace(resolved=slots[writers_at])
    unique, inverse, writers = np.unique(
        pages[batch].astype(np.int64), return_inverse=True, return_counts=True
    )
    claims = pool.claims[unique]
    hashed = (claims & HASHED) != 0
    alone = ((claims & REF_MASK) == writers) & ((claims & HELD) < PIN)
    keeps = alone & (~hashed | (writers == 1))
    # The writer with the most tokens keeps the original: it writes only above what every other row has there,
    # so that a rollback after the launch gives them back an untouched page.
    order = np.argsort(past[batch], kind="stable")
    keeper = np.zeros(len(unique), dtype=np.int64)
    keeper[inverse[order]] = order
    copied = np.ones(len(batch), dtype=np.bool_)
    copied[keeper[keeps]] = False
    rows = batch[copied]
    sources = pages[rows].astype(np.int64)
    return SharedWrites(rows, cells[rows], sources, unique[keeps & hashed], slots[writers_at])


def _copy_plan(shared: SharedWrites, targets: Int64Array, past: Int64Array, mask: int) -> CopyPlan | None:
    if not len(shared.cells):
        return None
    columns = (shared.sources, targets, past[shared.batch] & mask)
    return CopyPlan(*(column.astype(np.int32) for column in columns))


def _grown_cells(
    table: BlockTable, slots: Int64Array, old: Int64Array, growth: Int64Array, total: int
) -> Int64Array:
    """Flat indices of the new cells of each row, first column first."""
    first = slots * table.num_columns + old
    if total == len(slots):
        return first
    ends = np.cumsum(growth)
    return np.repeat(first - ends + growth, growth) + np.arange(total)


def _apply_reserve(state: KVState, step: StepTransaction) -> StepTransaction:
    table, pool, epochs = state.table, state.pool, state.epochs
    epochs.begun = epochs.launched = step.epoch
    state.step = step
    if len(step.choice.pages):
        state.apply_take(step.choice)
        count = len(step.grown_cells)
        table.flat[step.grown_cells] = step.choice.pages[:count]
        table.n_blocks[step.grown_rows] = step.new_blocks[step.grown]
        state.ledger.outstanding -= step.promised_taken
    if len(step.shared.cells):
        table.flat[step.shared.cells] = step.choice.pages[len(step.grown_cells) :]
        pool.apply_drop(step.shared.sources, step.epoch)
        pool.counters.copies += len(step.shared.cells)
        table.apply_touch(step.slots[step.shared.batch])
    if len(step.shared.unregister):
        state.prefix.apply_forget(step.shared.unregister.tolist())
    if step.charged is not None:
        state.ledger.apply_charge(table.tenant[step.slots], step.charged)
    return step
