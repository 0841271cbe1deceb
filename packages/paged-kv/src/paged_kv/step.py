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

from .block_pool import PageChoice
from .copy_plan import CopyPlan
from .vectors import IntVector

if TYPE_CHECKING:
    from .index_buffers import IndexPlanBuffers
    from .index_plan import PagedIndexPlan
    from .step_calls import StepCalls

Int64Array = npt.NDArray[np.int64]


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
