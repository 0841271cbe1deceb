"""Reserved addresses of which only what is needed has memory behind it.

The whole reservation is made once and never billed; granules are committed to it and taken away again, and
no byte ever moves, so that a captured graph and every pointer into the cache stay good. A commit is all or
nothing, again and again the same (what is already claimed is left alone), and billed only for granules that
nobody had mapped. Invariants V1 to V6 hold between any two calls:

    V1  the granules that the books call mapped are those that the driver has mapped
    V2  a granule's references are its claims; it is mapped if it has one, or is poisoned
    V3  what is billed is what is mapped, and the leases fit in the tier
    V4  physical bytes are at most the attributed ones, and equal to them when bindings share no granule
    V5  after any failed driver call V1 to V3 hold, and handles are mapped, pooled or quarantined
    V6  nothing is mapped or unmapped during a capture, nothing is unmapped under work in flight
"""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from types import TracebackType

import numpy as np

from paged_kv.errors import (
    ArenaClosed,
    CapacityUnavailable,
    DriverCallFailed,
    ForeignPlan,
    GranularityMismatch,
    InvalidGeometry,
    InvariantViolation,
    RangeQuarantined,
    WorkInFlight,
)
from paged_kv.geometry import is_integer

from .commit import CommitOutcome, CommitWork
from .decommit import DecommitOutcome, apply_decommit
from .fence import WorkFence
from .grant import MappedGrowthGrant
from .granules import GranuleTable
from .handle_pool import HandlePool
from .ledger import AdmissionRefused
from .placement import Placement
from .planner import CommitPlan, CommitPlanner, DecommitPlan


class VirtualArena:
    """The addresses of one cache; a context manager. Any thread may commit, one at a time.

    Nothing is given back by a finaliser: close it.

    Args:
        placement: where the bindings lie.
        pool: where handles come from, and with it the driver, the governor and the capture gate.

    Attributes:
        address: the first byte.
        table: what is mapped and claimed.
        planner: plans for it.
        fence: tell it of every launch that touches the cache.

    Raises:
        GranularityMismatch: the placement and the pool work with different granules.
        CaptureInProgress: this thread captures.
        DriverCallFailed: the addresses could not be reserved.
    """

    def __init__(self, placement: Placement, pool: HandlePool) -> None:
        if placement.granularity != pool.granule:
            raise GranularityMismatch(
                f"the placement has granules of {placement.granularity} bytes, the pool of {pool.granule}; "
                "make both with the same",
                given=placement.granularity,
                expected=pool.granule,
            )
        self.placement, self.pool = placement, pool
        self.table = GranuleTable(placement)
        self.planner = CommitPlanner(placement)
        self.fence = WorkFence(pool.driver, pool.gate)
        self._lock = threading.RLock()
        self._last_stream: int | None = None
        self._closed = False
        calls, driver = pool.calls, pool.driver
        with pool.gate.memory():
            self._ready = calls("reserve", driver.create_event)
            try:
                self.address = calls(
                    "reserve", driver.reserve_addresses, placement.total_bytes, placement.granularity
                )
            except BaseException:
                with suppress(DriverCallFailed):
                    calls("undo", driver.destroy_event, self._ready)
                raise

    @property
    def mapped_bytes(self) -> int:
        """Physical bytes behind the arena, poisoned ones included; also what is billed."""
        return self.table.mapped_bytes

    @property
    def attributed_bytes(self) -> int:
        """What the bindings claim, each for itself: shared granules count for each."""
        return self.table.attributed_bytes

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def address_of(self, binding: int) -> int:
        """The device address of the binding, for ever.

        Raises:
            InvalidGeometry: there is no such binding.
        """
        if not is_integer(binding) or not 0 <= binding < len(self.placement.bases):
            raise InvalidGeometry(
                f"there are {len(self.placement.bases)} bindings; {binding!r} is none of them",
                given=repr(binding),
            )
        return self.address + int(self.placement.bases[binding])

    def commit(
        self, plan: CommitPlan, *, stream: int = 0, grant: MappedGrowthGrant | None = None
    ) -> CommitOutcome | AdmissionRefused:
        """Back the plan's tokens with memory, zeroed in the order of `stream`.

        Args:
            plan: of this arena's planner, for its present state.
            stream: the stream that writes next; others call `wait_ready`.
            grant: the right to map; None to ask for one when there is something to map. It is settled here.

        Returns:
            What was done; or why there may not be so much memory, with nothing changed.

        Raises:
            ArenaClosed, ForeignPlan: not now, or not this plan.
            CaptureInProgress: this thread captures.
            GrantOpen: this thread holds another grant.
            ForeignGrant, GrantSettled, CapacityUnavailable: the grant does not cover it.
            RangeQuarantined: a granule is out of service; or a failed commit could not be taken back.
            DriverCallFailed: a call failed; everything was taken back.
        """
        self.pool.gate.require_not_capturing()
        self._require_plan(plan)
        if grant is not None:
            grant.require(self.pool.governor, self.pool.holder)
        elif plan.billed_bytes:
            asked = self.pool.governor.grant(self.pool.holder, plan.billed_bytes)
            if isinstance(asked, AdmissionRefused):
                return asked
            with asked:
                return self._commit(plan, stream, asked)
        return self._commit(plan, stream, grant)

    def decommit(self, plan: DecommitPlan) -> DecommitOutcome:
        """Take back what the plan does not keep. Nothing that was launched may still touch it.

        A granule that cannot be unmapped is quarantined and the others go on: see the outcome.

        Raises:
            ArenaClosed, ForeignPlan: not now, or not this plan.
            CaptureInProgress: this thread captures.
            WorkInFlight: something launched may not be done.
            DriverCallFailed: an event could not be asked; nothing was changed.
        """
        self.pool.gate.require_not_capturing()
        with self.pool.gate.memory(), self._lock:
            self._require_plan(plan)
            self.require_idle()
            return apply_decommit(self.pool, self.table, self.address, plan)

    def wait_idle(self) -> None:
        """Let the host wait for everything that was launched, and for the zeroing of commits.

        Raises:
            ArenaClosed: there is nothing to wait for any more.
            CaptureInProgress: this thread captures.
            DriverCallFailed: with the streams still busy.
        """
        self._require_open()
        self.fence.wait()
        with self.pool.gate.memory():
            self.pool.calls("fence", self.pool.driver.wait_event, self._ready)

    def require_idle(self) -> None:
        """Refuse to go on while launched work, or the zeroing of a commit, may touch the cache.

        Raises:
            ArenaClosed: it was closed.
            WorkInFlight: with the busy streams.
            DriverCallFailed: an event could not be asked.
        """
        self._require_open()
        self.fence.require_idle()
        stream = self._last_stream
        if stream is None:
            return
        with self.pool.gate.memory():
            done = self.pool.calls("fence", self.pool.driver.event_done, self._ready)
        if not done:
            raise WorkInFlight(
                f"new memory is still being zeroed on stream {stream}; wait for it, then unmap",
                streams=(stream,),
            )

    def wait_ready(self, stream: int) -> None:
        """Let later work on `stream` wait until all that was committed is zero.

        Raises:
            ArenaClosed: it was closed.
            CaptureInProgress: this thread captures.
            DriverCallFailed: it could not.
        """
        self._require_open()
        self.pool.gate.require_not_capturing()
        self.pool.calls("publish", self.pool.driver.stream_wait_event, stream, self._ready)

    def check(self) -> None:
        """Verify V2 to V4 on the books.

        Raises:
            InvariantViolation: with the invariant's name.
        """
        with self._lock:
            table, granule = self.table, self.placement.cell_granule
            claims = np.bincount(granule[table.claimed], minlength=len(table.refs))
            mapped = np.zeros(len(table.refs), dtype=np.bool_)
            mapped[list(table.handles)] = True
            live = self.mapped_bytes - table.poisoned_bytes
            billed = self.pool.governor.account(self.pool.holder).mapped
            out = self.pool.num_out * self.pool.granule
            _require("V2", np.array_equal(claims, table.refs), "references are claims")
            _require(
                "V2", np.array_equal(mapped, (claims > 0) | table.poisoned), "mapped if claimed or poisoned"
            )
            _require("V3", self.mapped_bytes <= out == billed, f"{out} bytes of handles out, {billed} billed")
            _require(
                "V4", live <= self.attributed_bytes, f"{live} physical, {self.attributed_bytes} attributed"
            )

    def close(self) -> DecommitOutcome:
        """Give everything back. Poisoned granules keep their addresses reserved. A second call does nothing.

        Raises:
            CaptureInProgress: this thread captures.
            WorkInFlight: something launched may not be done; `wait_idle` first.
            DriverCallFailed: the addresses or an event could not be given back; the memory was.
        """
        self.pool.gate.require_not_capturing()
        with self.pool.gate.memory(), self._lock:
            if self._closed:
                return DecommitOutcome(0, 0)
            outcome = self.decommit(self.planner.shrink_plan(self.table, 0))
            self._closed = True
            self._apply_free()
            return outcome

    def __enter__(self) -> VirtualArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self.wait_idle()
            self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ArenaClosed("the arena was closed; make another")

    def _require_plan(self, plan: CommitPlan | DecommitPlan) -> None:
        self._require_open()
        if plan.table is not self.table or plan.version != self.table.version:
            raise ForeignPlan(
                f"the plan is for version {plan.version} of its arena's state, this arena is at "
                f"{self.table.version} (same arena: {plan.table is self.table}); plan again",
                given=plan.version,
                expected=self.table.version,
            )

    def _commit(self, plan: CommitPlan, stream: int, grant: MappedGrowthGrant | None) -> CommitOutcome:
        with self.pool.gate.memory() if plan.billed_bytes else nullcontext(), self._lock:
            self._require_plan(plan)
            self._require_healthy(plan)
            if grant is not None and plan.billed_bytes:
                return self._map(plan, stream, grant)
            if grant is not None:
                grant.rollback()
            self.table.apply_commit(plan.cells, [], [])
            return CommitOutcome(0, 0, 0, grant is not None)

    def _map(self, plan: CommitPlan, stream: int, grant: MappedGrowthGrant) -> CommitOutcome:
        if grant.nbytes < plan.billed_bytes:
            raise CapacityUnavailable(
                f"the grant is for {grant.nbytes} bytes and {plan.billed_bytes} are to be mapped",
                granted=grant.nbytes,
                needed=plan.billed_bytes,
            )
        follows = self._last_stream not in (None, stream)
        work = CommitWork(self.pool, plan, self.address, stream, self._ready, follows)
        try:
            work.run(grant.sources.fresh)
        except BaseException as error:
            self._apply_undo(work, grant, error)
            raise
        grant.settle(plan.billed_bytes, work.created * self.pool.granule)
        self.table.apply_commit(plan.cells, work.granules, work.handles)
        self._last_stream = stream
        return CommitOutcome(plan.billed_bytes, work.created, len(plan.run_first), granted=True)

    def _require_healthy(self, plan: CommitPlan) -> None:
        bad = np.flatnonzero(self.table.poisoned[self.placement.cell_granule[plan.cells]])
        if len(bad):
            granules = np.unique(self.placement.cell_granule[plan.cells[bad]]).tolist()
            raise RangeQuarantined(
                f"{len(granules)} granules of the range are out of service, first {granules[0]}; close the "
                "arena and make another",
                granules=tuple(granules),
                needed=plan.billed_bytes,
            )

    def _apply_undo(self, work: CommitWork, grant: MappedGrowthGrant, error: BaseException) -> None:
        """Take the work back, and say so when that does not succeed."""
        work.undo()
        size = self.pool.granule
        owned = (work.poisoned_fresh + work.stranded) * size
        grant.settle(len(work.poisoned) * size, owned, work.stranded * size)
        self.pool.poison(list(work.poisoned.values()))
        for granule, handle in work.poisoned.items():
            self.table.apply_poison(granule, handle)
        if work.poisoned or work.stranded:
            raise RangeQuarantined(
                f"a failed commit could not be taken back: {len(work.poisoned)} granules and {work.stranded} "
                "handles are out of service and stay billed",
                granules=tuple(sorted(work.poisoned)),
                handles=work.stranded,
            ) from error

    def _apply_free(self) -> None:
        """Give the addresses and the events back; the first failure is told after all was tried."""
        pool, first = self.pool, None
        steps = [lambda: pool.calls("close", pool.driver.destroy_event, self._ready), self.fence.close]
        if not self.table.handles:
            size = self.placement.total_bytes
            steps.insert(0, lambda: pool.calls("close", pool.driver.free_addresses, self.address, size))
        for step in steps:
            try:
                step()
            except DriverCallFailed as error:
                first = first or error
        if first is not None:
            raise first


def _require(name: str, ok: bool, message: str) -> None:
    if not ok:
        raise InvariantViolation(f"{name}: {message}", invariant=name)
