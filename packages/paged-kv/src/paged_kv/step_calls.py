"""The manager's calls around a step."""

from __future__ import annotations

from . import finish
from .authority import Authority
from .errors import EpochOutOfOrder, StalePlan
from .geometry import is_integer
from .index_buffers import IndexPlanBuffers
from .index_plan import Batch, PagedIndexPlan, build_fresh, require_contiguous
from .outcomes import CapacityDeferred, UnserviceableRequest
from .reserve import reserve
from .step import StepState, StepTransaction
from .vectors import IntVector, as_handles, as_query_lengths


class StepCalls(Authority):
    """Begin, plan, commit, complete."""

    def begin_step(
        self, rows: IntVector, query_lens: IntVector | int
    ) -> StepTransaction | CapacityDeferred | UnserviceableRequest:
        """Reserve what `query_lens[i]` more tokens of each row need.

        Args:
            rows: distinct handles, in batch order; none for a step of padding only.
            query_lens: tokens that each row writes, 0 included; one integer for all.

        Returns:
            The open transaction; or `CapacityDeferred` when waiting can help; or `UnserviceableRequest`
            when it cannot.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest, PageNotResident: bad rows.
            InvalidLength: bad lengths.
            StepOpen: another step is open.
        """
        state = self._enter()
        handles = as_handles(rows).copy()
        lengths = as_query_lengths(query_lens, len(handles))
        return self._apply_leave(reserve(self, state, handles, lengths))

    def complete(self, epoch: int) -> None:
        """Say that the device is done with every step up to `epoch`: what they read may now be reused.

        Raises:
            EpochOutOfOrder: the epoch was completed before, was never launched, or is still open.
        """
        state = self._enter()
        epochs = state.epochs
        last = epochs.launched if state.step is None else state.step.launched_before
        if not is_integer(epoch) or not epochs.completed < epoch <= last:
            raise EpochOutOfOrder(
                f"epoch {epoch!r} cannot complete: {epochs.completed} is complete, {last} was launched last",
                epoch=repr(epoch),
                completed=epochs.completed,
                last=last,
            )
        done = [record for record in epochs.pending if record.epoch <= epoch]
        settled = [(record, finish.still_theirs(state, record)) for record in done]
        finish.apply_complete(state, int(epoch), settled)

    def require_current(self, plan: PagedIndexPlan) -> None:
        """Refuse a plan whose rows changed after it was made, or that belongs to an earlier step.

        Raises:
            StalePlan: with the row or the epochs.
        """
        state = self._enter()
        if plan.geometry is not state.geometry or (plan.epoch and plan.epoch != state.epochs.begun):
            raise StalePlan(
                f"the plan belongs to step {plan.epoch} and the last step is {state.epochs.begun}",
                epoch=plan.epoch,
                current=state.epochs.begun,
            )
        changed = state.table.version[plan.batch.slots] > plan.batch.stamp
        if changed.any():
            row = int(plan.batch.slots[int(changed.argmax())])
            raise StalePlan(f"row {row} changed after the plan was made; plan again", row=row)

    def _plan(
        self, transaction: StepTransaction, buffers: IndexPlanBuffers | None, allow_window_holes: bool
    ) -> PagedIndexPlan:
        state = self._enter()
        finish.require_open(transaction)
        if not allow_window_holes and state.table.num_advanced:
            require_contiguous(self._view, transaction.slots)
        batch = Batch(
            transaction.slots,
            transaction.query_lens,
            transaction.past_lens,
            transaction.new_lens,
            transaction.new_blocks,
            transaction.num_tokens,
            transaction.longest,
            transaction.most,
            transaction.least,
            state.table.last_version,
            transaction.epoch,
        )
        plan = build_fresh(self._view, batch) if buffers is None else buffers.emit(self._view, batch)
        transaction.state = StepState.EMITTED
        return plan

    def _commit(self, transaction: StepTransaction) -> None:
        finish.commit(self._enter(), transaction)

    def _commit_prefix(self, transaction: StepTransaction, accepted: IntVector | int) -> None:
        finish.commit_prefix(self._enter(), transaction, accepted)

    def _rollback(self, transaction: StepTransaction) -> None:
        finish.rollback(self._enter(), transaction)
