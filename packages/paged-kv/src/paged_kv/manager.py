"""The page authority: the only thing that allocates, shares and frees pages.

Every call is all or nothing: it either returns with everything done, or returns an outcome or raises a typed
    error with
nothing changed. Hot calls take arrays of rows. One thread owns the manager, and event callbacks may not call
it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from itertools import count as counter
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from . import lifecycle, step
from .admission import AdmissionLedger, admit
from .block_pool import BlockPool
from .block_table import MAX_ROWS, TAG_MASK, BlockTable
from .errors import (
    EpochOutOfOrder,
    InvalidGeometry,
    Reentrancy,
    StorageAlreadyOwned,
    WrongThread,
)
from .events import EventLog, EventSink
from .geometry import PageGeometry
from .index_buffers import IndexPlanBuffers
from .index_plan import Batch, PagedIndexPlan, build_fresh, require_contiguous
from .outcomes import CapacityDeferred, UnserviceableRequest
from .prefix_cache import PrefixCache, PrefixHit
from .snapshot import snapshot
from .state import KVState
from .stats import KVCacheStats
from .step import StepState, StepTransaction
from .swap import HostPool
from .vectors import IntVector, as_handles, as_lengths
from .view import KVView

Int64Array = npt.NDArray[np.int64]
Result = TypeVar("Result")

_tags = counter()
_owners: WeakValueDictionary[Hashable, KVCacheManager] = WeakValueDictionary()


class KVCacheManager:
    """The page authority of one paged cache.

    Example:
        >>> kv = KVCacheManager(PageGeometry(num_blocks=8, block_size=16), max_sequences=4,
        max_blocks_per_sequence=4) >>> rows = kv.create(2) >>> with kv.begin_step(rows, [20, 1]) as step: ...
        plan = step.plan() ...     step.commit() >>> plan.block_table.tolist() [[1, 2], [3, -1]] >>>
        kv.complete(step.epoch) >>> kv.release(rows)

    Args:
        geometry: the pool.
        max_sequences: rows.
        max_blocks_per_sequence: columns: the longest context is this times the block size. None for the whole
            pool.
        watermark: pages that admission leaves free for running rows.
        host_blocks: host pages for swapping; 0 for none.
        verify_tokens: keep and compare tokens behind digests, for a hash function with collisions.
        event_sinks: callables that are given every `KVCacheEvent`.
        storage: names the cache tensors, such as their address; a second live manager over the same storage
            is refused.

    Raises:
        InvalidGeometry: a size is out of range.
        StorageAlreadyOwned: another live manager owns `storage`.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        *,
        max_sequences: int = 256,
        max_blocks_per_sequence: int | None = None,
        watermark: int = 0,
        host_blocks: int = 0,
        verify_tokens: bool = False,
        event_sinks: Sequence[EventSink] = (),
        storage: Hashable | None = None,
    ) -> None:
        columns = geometry.usable_blocks if max_blocks_per_sequence is None else max_blocks_per_sequence
        _require_between("max_sequences", max_sequences, 1, MAX_ROWS)
        _require_between("max_blocks_per_sequence", columns, 1, (2**31 - 1) // geometry.block_size)
        _require_between("watermark", watermark, 0, geometry.usable_blocks - 1)
        _require_between("host_blocks", host_blocks, 0, 2**31 - 1)
        if storage is not None and storage in _owners:
            raise StorageAlreadyOwned(
                f"storage {storage!r} already has a live manager; one cache has one authority",
                storage=repr(storage),
            )
        pool, events = BlockPool(geometry), EventLog(list(event_sinks))
        self._state = KVState(
            geometry=geometry,
            pool=pool,
            table=BlockTable(max_sequences, columns, next(_tags) & TAG_MASK),
            prefix=PrefixCache(pool, events, verify_tokens),
            ledger=AdmissionLedger(watermark),
            host=HostPool(host_blocks),
            events=events,
        )
        self._view = KVView.of(self._state)
        self._owner = threading.get_ident()
        if storage is not None:
            _owners[storage] = self

    def _enter(self) -> KVState:
        if threading.get_ident() != self._owner:
            raise WrongThread(
                f"thread {threading.get_ident()} calls a manager that thread {self._owner} owns; move it with adopt()",
                caller=threading.get_ident(),
                owner=self._owner,
            )
        if self._state.events.delivering:
            raise Reentrancy(
                "an event callback calls the manager; note the event and call after the operation returns"
            )
        return self._state

    def adopt(self) -> None:
        """Make the calling thread the owner. The former owner must have stopped calling."""
        self._owner = threading.get_ident()

    @property
    def geometry(self) -> PageGeometry:
        """The pool's geometry."""
        return self._state.geometry

    def view(self) -> KVView:
        """Read-only, live arrays for `PagedIndexPlan.build`."""
        return self._view

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
        count = int(as_lengths(count, 1, "count")[0])
        lifecycle.require_window(window, sink)
        return lifecycle.create(state, count, window, tenant)

    def admit(
        self,
        total_lens: IntVector | int,
        *,
        tenant: str | None = None,
        window: int = 0,
        hits: Sequence[PrefixHit | None] | None = None,
    ) -> Int64Array | CapacityDeferred | UnserviceableRequest:
        """Open one sequence for each total length, if every page that they will ever need can be promised
        now.

        Whoever is admitted can finish: later admissions and rows without a promise only get what is left
            beyond it.

        Args:
            total_lens: prompt plus output tokens of each sequence; a single integer opens one.
            tenant: whose quota the sequences count for.
            window: sliding window in tokens; 0 for none.
            hits: prefix hits to attach, one a sequence or None; they stay open unless the sequences are
                admitted.

        Returns:
            int64 handles; or `CapacityDeferred`; or `UnserviceableRequest` when no amount of waiting helps.

        Raises:
            InvalidLength, InvalidWindow: bad arguments.
            HitClosed: a hit was used before.
        """
        state = self._enter()
        lengths = as_lengths(np.atleast_1d(np.asarray(total_lens)), np.size(total_lens), "total_lens")
        lifecycle.require_window(window, 0)
        return self._leave(admit(state, lengths, tenant, window, hits))

    def set_quota(self, tenant: str, pages: int | None) -> None:
        """Limit the pages of `tenant`'s rows, promised ones included; None lifts the limit. Rows keep what they have."""
        state = self._enter()
        if pages is not None:
            _require_between("pages", pages, 0, 2**31 - 1)
        state.ledger.apply_quota(tenant, pages)

    def begin_step(
        self, rows: IntVector, query_lens: IntVector | int
    ) -> StepTransaction | CapacityDeferred | UnserviceableRequest:
        """Reserve what `query_lens[i]` more tokens of each row need.

        Args:
            rows: distinct handles, in batch order.
            query_lens: tokens that each row writes, 0 included; one integer for all.

        Returns:
            The open transaction; or `CapacityDeferred` when waiting can help; or `UnserviceableRequest` when
            it cannot.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest, PageNotResident: bad rows.
            InvalidLength: bad lengths.
            StepOpen: another step is open.
        """
        state = self._enter()
        handles = as_handles(rows).copy()
        query = as_lengths(query_lens, len(handles), "query_lens").copy()
        result = step.reserve(self, state, handles, query)
        return self._leave(result)

    def _plan(
        self, transaction: StepTransaction, buffers: IndexPlanBuffers | None, allow_window_holes: bool
    ) -> PagedIndexPlan:
        self._enter()
        step.require_open(transaction)
        if not allow_window_holes and self._state.table.num_advanced:
            require_contiguous(self._view, transaction.slots)
        batch = Batch(
            transaction.slots,
            transaction.query_lens,
            transaction.past_lens,
            transaction.new_lens,
            transaction.new_blocks,
            self._view.version[transaction.slots],
            transaction.num_tokens,
            transaction.epoch,
        )
        plan = build_fresh(self._view, batch) if buffers is None else buffers.emit(self._view, batch)
        transaction.state = StepState.EMITTED
        return plan

    def _commit(self, transaction: StepTransaction) -> None:
        step.commit(self._enter(), transaction)

    def _commit_prefix(self, transaction: StepTransaction, accepted: IntVector | int) -> None:
        step.commit_prefix(self._enter(), transaction, accepted)

    def _rollback(self, transaction: StepTransaction) -> None:
        step.rollback(self._enter(), transaction)

    def complete(self, epoch: int) -> None:
        """Say that the device is done with every step up to `epoch`: what they could read may now be reused.

        Raises:
            EpochOutOfOrder: the epoch was completed before, was never launched, or is still open.
        """
        state = self._enter()
        epochs = state.epochs
        last = epochs.launched if state.step is None else state.step.launched_before
        if not epochs.completed < epoch <= last:
            raise EpochOutOfOrder(
                f"epoch {epoch} cannot complete: {epochs.completed} is complete and {last} was the last to be committed",
                epoch=epoch,
                completed=epochs.completed,
                last=last,
            )
        done = [record for record in epochs.pending if record.epoch <= epoch]
        step.apply_complete(state, epoch, [(record, step.still_theirs(state, record)) for record in done])

    def release(self, rows: IntVector | int) -> None:
        """End sequences. Their pages wait for the steps in flight; registered ones then stay as cached
        content.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest: bad rows, a second release among
                them.
            RowBusy: a row belongs to an open step or swap.
        """
        state = self._enter()
        lifecycle.release(state, self._rows(rows))

    def stats(self) -> KVCacheStats:
        """A snapshot of the maintained counters; costs the same for any pool."""
        return snapshot(self._enter())

    def _rows(self, rows: IntVector | int) -> Int64Array:
        table = self._state.table
        slots = table.resolve(as_handles(rows))
        table.require_distinct(slots)
        return slots

    def _leave(self, result: Result) -> Result:
        """Count refusals and tell observers what happened; the last thing that an operation does."""
        if isinstance(result, CapacityDeferred):
            self._state.tally.deferrals += 1
        elif isinstance(result, UnserviceableRequest):
            self._state.tally.unserviceable += 1
        if self._state.events.waiting:
            self._state.events.apply_deliver()
        return result


def _require_between(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise InvalidGeometry(
            f"{name} is {value!r}; it must be an integer in [{low}, {high}]", name=name, given=repr(value)
        )
