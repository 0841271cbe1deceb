"""Carrying out a commit on the driver: phases, each of which can be taken back.

    create the handles ─► map them ─► set access, once a run ─► zero, on the writer's stream ─► record

A failure takes everything back in reverse. What cannot be unmapped again is quarantined: it stays mapped
and billed and is never used. `CommitWork` touches no table and no account; its fields say what happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_kv.errors import CapacityUnavailable, DriverCallFailed

from .handle_pool import HandlePool
from .planner import CommitPlan


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What a commit did.

    Attributes:
        billed_bytes: bytes mapped that were not before.
        created: handles that had to be created for it; the rest came from the pool.
        runs: calls that set access, one a run of neighbouring granules.
        granted: whether a grant was needed.
    """

    billed_bytes: int
    created: int
    runs: int
    granted: bool


@dataclass(slots=True)
class CommitWork:
    """One commit under way.

    Attributes:
        pool: where handles come from.
        plan: what to map.
        address: where the arena starts.
        stream: whose order the zeroing has.
        ready: the event to record once the bytes are zero.
        follows: whether another stream recorded it last, so that this one must wait for it.
        handles: one a newly mapped granule, when it is done.
        pooled: those of them that the pool had.
        mapped: how many granules are mapped.
        poisoned: handle by granule that could not be unmapped.
        stranded: new handles that could not be released.
    """

    pool: HandlePool
    plan: CommitPlan
    address: int
    stream: int
    ready: int
    follows: bool
    handles: list[int] = field(default_factory=list)
    pooled: int = 0
    mapped: int = 0
    launched: bool = False
    poisoned: dict[int, int] = field(default_factory=dict)
    stranded: int = 0

    @property
    def granules(self) -> list[int]:
        """The granules to map, ascending."""
        return [int(granule) for granule in self.plan.newly_mapped]

    @property
    def created(self) -> int:
        """Handles that were created for it."""
        return len(self.handles) - self.pooled

    def run(self, creatable: int) -> None:
        """All phases, creating at most `creatable` bytes of handles.

        Raises:
            CapacityUnavailable: more would have to be created.
            DriverCallFailed: a call failed; `undo` is the caller's next call in both cases.
        """
        pool, size = self.pool, self.pool.granule
        self.handles = pool.take(len(self.plan.newly_mapped))
        self.pooled = len(self.handles)
        missing = (len(self.plan.newly_mapped) - self.pooled) * size
        if missing > creatable:
            raise CapacityUnavailable(
                f"{missing} bytes must be created and the grant covers {creatable}: the pool has "
                "fewer handles than its account; a holder has one pool",
                needed=missing,
                granted=creatable,
            )
        while len(self.handles) < len(self.plan.newly_mapped):
            self.handles.append(pool.create())
        for granule, handle in zip(self.granules, self.handles, strict=True):
            pool.calls("map", pool.driver.map_handle, self.address + granule * size, size, handle)
            self.mapped += 1
        runs = list(zip(self.plan.run_first.tolist(), self.plan.run_count.tolist(), strict=True))
        for first, count in runs:
            pool.calls("access", pool.driver.set_access, self.address + first * size, count * size)
        for first, count in runs:
            self.launched = True
            pool.calls("zero", pool.driver.fill, self.address + first * size, 0, count * size, self.stream)
        if self.follows:  # so that one event stands for all zeroing so far
            pool.calls("publish", pool.driver.stream_wait_event, self.stream, self.ready)
        pool.calls("publish", pool.driver.record_event, self.ready, self.stream)

    def undo(self) -> None:
        """Take everything back; what cannot be is in `poisoned` and `stranded`."""
        if self.mapped:
            self._unmap(trust=self._settled())
        kept = set(self.poisoned.values())
        self.pool.put_back([handle for handle in self.handles[: self.pooled] if handle not in kept])
        for handle in self.handles[self.pooled :]:
            if handle not in kept:
                try:
                    self.pool.destroy(handle)
                except DriverCallFailed:
                    self.stranded += 1

    @property
    def poisoned_fresh(self) -> int:
        """Poisoned granules whose handle was new."""
        fresh = set(self.handles[self.pooled :])
        return len(fresh.intersection(self.poisoned.values()))

    def _settled(self) -> bool:
        """Whether the zeroing, if any was launched, is known to be over."""
        if not self.launched:
            return True
        try:
            self.pool.calls("undo", self.pool.driver.synchronize, self.stream)
        except DriverCallFailed:
            return False
        return True

    def _unmap(self, trust: bool) -> None:
        """Unmap in reverse. Without `trust` a fill may still be writing, so nothing may be unmapped."""
        size, driver = self.pool.granule, self.pool.driver
        for granule, handle in reversed(list(zip(self.granules, self.handles, strict=False))[: self.mapped]):
            try:
                if trust:
                    self.pool.calls("undo", driver.unmap, self.address + granule * size, size)
                    continue
            except DriverCallFailed:
                pass
            self.poisoned[granule] = handle
