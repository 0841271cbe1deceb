"""One step as a transaction: reserve, plan, then commit some, all or none of it.

`reserve` judges the whole batch's need once, before anything changes: new pages, and copies of pages that
others can read. Then table, references and copies are in place, but lengths are not: `commit` moves those,
and only assigns, so it cannot fail halfway. Rolling back restores tables, lengths and references exactly;
what is not promised back is the order of the free queues and cached content that was evicted for the
reservation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .admission import charges
from .block_pool import HASHED, HELD, PIN, REF, REF_MASK, PageChoice
from .block_table import PAD, ROW_STATE_NAMES, SLOT_MASK, BlockTable
from .copy_plan import CopyPlan
from .errors import AcceptedOutOfRange, InvalidLength, PageNotResident, StepClosed, StepOpen
from .outcomes import CapacityDeferred, UnserviceableRequest
from .state import InFlight, KVState, RecentBatch
from .vectors import IntVector, QueryLengths, as_lengths

if TYPE_CHECKING:
    from .index_buffers import IndexPlanBuffers
    from .index_plan import PagedIndexPlan
    from .step_calls import StepCalls

Int64Array = npt.NDArray[np.int64]
EMPTY: Int64Array = np.empty(0, dtype=np.int64)


class StepState(Enum):
    """Where a transaction stands."""

    RESERVED = "reserved"
    EMITTED = "emitted"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


class SharedWrites(NamedTuple):
    """Write targets that others can read: which cells get a copy, and which pages only lose their digest.

    `resolved` are the rows whose last page is theirs alone once the step commits.
    """

    batch: Int64Array
    cells: Int64Array
    sources: Int64Array
    unregister: Int64Array
    resolved: Int64Array


NO_PAGES = PageChoice(EMPTY, 0, -1, -1)
NO_SHARED_WRITES = SharedWrites(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)


@dataclass(slots=True, eq=False)
class StepTransaction:
    """A reserved step. Use it as a context manager; leaving the block without a commit rolls back.

    Attributes:
        epoch: the number to pass to `KVCacheManager.complete` when the device is done with the step.
        handles: ``(batch,)`` int64.
        slots: ``(batch,)`` int64, the rows.
        query_lens: ``(batch,)`` int64, tokens that each row writes.
        past_lens: ``(batch,)`` int64, tokens before the step.
        new_lens: ``(batch,)`` int64, tokens after a full commit.
        num_tokens: query tokens of the batch.
        longest: the longest query.
        most: the longest context after a full commit.
        least: the shortest context after a full commit.
        copies: run this before the step's kernels; None when no page needs a copy.
        state: where the transaction stands.
    """

    manager: StepCalls
    epoch: int
    handles: Int64Array
    slots: Int64Array
    query_lens: Int64Array
    past_lens: Int64Array
    new_lens: Int64Array
    num_tokens: int
    longest: int
    most: int
    least: int
    old_blocks: Int64Array
    new_blocks: Int64Array
    grown: Int64Array
    grown_rows: Int64Array
    grown_cells: Int64Array
    choice: PageChoice
    shared: SharedWrites
    copies: CopyPlan | None
    charged: Int64Array | None
    promised_taken: int
    launched_before: int
    state: StepState = StepState.RESERVED

    def __enter__(self) -> StepTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if self.is_open:
            self.rollback()
        return False

    @property
    def is_open(self) -> bool:
        """Whether the step can still be committed or rolled back."""
        return self.state is StepState.RESERVED or self.state is StepState.EMITTED

    def plan(
        self, buffers: IndexPlanBuffers | None = None, *, allow_window_holes: bool = False
    ) -> PagedIndexPlan:
        """The index tensors of the step, written into `buffers` or into fresh arrays.

        Args:
            buffers: caller-owned memory; None for arrays of exactly the batch's size.
            allow_window_holes: emit rows that gave up pages in front of their window, with PAD in those
                cells, for a kernel that never reads below the window.

        Raises:
            StepClosed: after a commit or rollback.
            PagedNonContiguousSequence: a row has holes and `allow_window_holes` is false.
            PagedTableTooNarrow, PagedBufferTooSmall: the buffers do not hold the batch; nothing was written.
        """
        return self.manager._plan(self, buffers, allow_window_holes)

    def commit(self) -> None:
        """Make all written tokens part of their rows.

        Raises:
            StepClosed: after a commit or rollback.
        """
        self.manager._commit(self)

    def commit_prefix(self, accepted: IntVector | int) -> None:
        """Keep only the first `accepted[i]` tokens of row i and give back the pages above them.

        Raises:
            StepClosed: after a commit or rollback.
            AcceptedOutOfRange: negative, or more than the row's query length; the step stays open.
        """
        self.manager._commit_prefix(self, accepted)

    def rollback(self) -> None:
        """Undo the reservation.

        Raises:
            StepClosed: after a commit or rollback.
        """
        self.manager._rollback(self)


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
    if ledger.used or ledger.quotas:
        charged = np.maximum(table.promised[slots], new_blocks) - charges(table, slots)
        over = ledger.batch_over_quota(table.tenant[slots], charged)
        if over is not None:
            return over
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


def require_open(step: StepTransaction) -> None:
    """Refuse a transaction that was already finished.

    Raises:
        StepClosed: committed or rolled back before.
    """
    if not step.is_open:
        raise StepClosed(f"step {step.epoch} was already {step.state.value}", epoch=step.epoch)


def commit(state: KVState, step: StepTransaction) -> None:
    """Move the lengths; see `StepTransaction.commit`."""
    require_open(step)
    record = InFlight(step.epoch, step.slots, step.handles, state.table.cut[step.slots], step.new_lens)
    _apply_commit(state, step, record, step.num_tokens)


def _apply_commit(state: KVState, step: StepTransaction, record: InFlight, tokens: int) -> None:
    state.table.seq_len[step.slots] = record.lengths
    state.epochs.pending.append(record)
    state.tally.steps += 1
    state.tally.tokens += tokens
    if len(step.shared.resolved):
        state.table.tail_shared[step.shared.resolved] = False
    step.state = StepState.COMMITTED
    state.step = None


def commit_prefix(state: KVState, step: StepTransaction, accepted: IntVector | int) -> None:
    """Move the lengths by `accepted` and give back what lies above; see `StepTransaction.commit_prefix`."""
    require_open(step)
    table = state.table
    try:
        kept = as_lengths(accepted, len(step.slots), "accepted")
    except InvalidLength as error:
        raise AcceptedOutOfRange(str(error), **error.numbers) from error
    if (kept > step.query_lens).any():
        row = int(np.flatnonzero(kept > step.query_lens)[0])
        raise AcceptedOutOfRange(
            f"batch row {row} accepts {int(kept[row])} tokens of {int(step.query_lens[row])} written",
            row=row,
            given=int(kept[row]),
            maximum=int(step.query_lens[row]),
        )
    lengths = step.past_lens + kept
    blocks = (lengths + state.geometry.block_size - 1) >> state.geometry.block_shift
    record = InFlight(step.epoch, step.slots, step.handles, table.cut[step.slots], lengths)
    cells, pages = state.take_back(step.slots, blocks, step.new_blocks)
    promised, charge = table.promised[step.slots], None
    back = np.maximum(promised - blocks, 0) - np.maximum(promised - step.new_blocks, 0)
    if step.charged is not None:
        charge = np.maximum(promised, blocks) - charges(table, step.slots)
    shrink = Shrink(blocks, cells, pages, step.slots[blocks < step.new_blocks], int(back.sum()), charge)
    _apply_commit_prefix(state, step, record, int(kept.sum()), shrink)


class Shrink(NamedTuple):
    """What a step's rows give back: cells and pages above `blocks`, promises and charges."""

    blocks: Int64Array
    cells: Int64Array
    pages: Int64Array
    shrunk: Int64Array
    promised: int
    charge: Int64Array | None


def _apply_commit_prefix(
    state: KVState, step: StepTransaction, record: InFlight, tokens: int, shrink: Shrink
) -> None:
    _apply_commit(state, step, record, tokens)
    _apply_shrink(state, step, shrink)


def _apply_shrink(state: KVState, step: StepTransaction, shrink: Shrink) -> None:
    state.table.n_blocks[step.slots] = shrink.blocks
    if len(shrink.cells):
        state.table.flat[shrink.cells] = PAD
        state.table.apply_touch(shrink.shrunk)
    if len(shrink.pages):
        state.pool.apply_drop(shrink.pages, step.epoch)
    state.ledger.outstanding += shrink.promised
    if shrink.charge is not None:
        state.ledger.apply_charge(state.table.tenant[step.slots], shrink.charge)


def rollback(state: KVState, step: StepTransaction) -> None:
    """Restore tables, lengths and references; see `StepTransaction.rollback`."""
    require_open(step)
    launched = step.state is StepState.EMITTED
    earlier = step.launched_before if step.launched_before > state.epochs.completed else 0
    pages = step.choice.pages[::-1]
    state.pool.require_refs(pages)
    charge = None if step.charged is None else -step.charged
    shrink = Shrink(step.old_blocks, step.grown_cells, pages, step.grown_rows, step.promised_taken, charge)
    _apply_rollback(state, step, shrink, launched, earlier)


def _apply_rollback(
    state: KVState, step: StepTransaction, shrink: Shrink, launched: bool, earlier: int
) -> None:
    table, pool = state.table, state.pool
    if len(step.shared.cells):
        table.flat[step.shared.cells] = step.shared.sources
        for source in step.shared.sources:  # the same source may serve several rows
            pool.apply_share(source.reshape(1))
        table.apply_touch(step.slots[step.shared.batch])
    _apply_shrink(state, step, shrink)
    if not launched:
        state.epochs.launched = step.launched_before
        pool.apply_refence(step.epoch, earlier)
    state.tally.rollbacks += 1
    step.state = StepState.ROLLED_BACK
    state.step = None


def still_theirs(state: KVState, record: InFlight) -> npt.NDArray[np.bool_]:
    """Which rows of a committed step are still the sequences that it wrote, not truncated since."""
    table = state.table
    same: npt.NDArray[np.bool_] = table.handle[record.slots] == record.handles
    same &= table.cut[record.slots] == record.cuts
    return same


def apply_complete(state: KVState, epoch: int, done: list[tuple[InFlight, npt.NDArray[np.bool_]]]) -> None:
    """Settle what the completed steps wrote, and free what waited for them."""
    for record, theirs in done:
        state.table.settled[record.slots[theirs]] = record.lengths[theirs]
        state.epochs.pending.popleft()
    state.epochs.completed = epoch
    state.pool.apply_complete(epoch)
