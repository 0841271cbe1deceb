"""Ending a step: commit all, commit a prefix, roll back, and later complete.

Each checks and computes first and then calls one ``_apply`` function, which only assigns; so a step is either
ended or still open, never half of each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .admission import charges
from .block_table import PAD
from .errors import AcceptedOutOfRange, InvalidLength, StepClosed
from .state import InFlight, KVState
from .step import StepState, StepTransaction
from .vectors import IntVector, as_lengths

Int64Array = npt.NDArray[np.int64]


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
    record = InFlight(step.epoch, step.slots, step.handles, state.table.last_version, step.new_lens)
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
    record = InFlight(step.epoch, step.slots, step.handles, table.last_version, lengths)
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
    same &= table.cut[record.slots] <= record.stamp
    return same


def apply_complete(state: KVState, epoch: int, done: list[tuple[InFlight, npt.NDArray[np.bool_]]]) -> None:
    """Settle what the completed steps wrote, and free what waited for them."""
    for record, theirs in done:
        state.table.settled[record.slots[theirs]] = record.lengths[theirs]
        state.epochs.pending.popleft()
    state.epochs.completed = epoch
    state.pool.apply_complete(epoch)
