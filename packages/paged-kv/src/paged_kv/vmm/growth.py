"""Growing a cache between two decode steps, in the one order that loses nothing.

    refuse beyond the maximum ─► new capacity, signature before ─► memory (a grant only if some is new)
    ─► zero on the writer's stream ─► compare signatures: keep the graph, or invalidate ─► publish ─► count

A failure before "publish" leaves capacity, addresses and graph as they were. The common step, which needs no
growth, is one comparison. Memory may be committed ahead of need on another thread and stream: then the
growth maps nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from paged_kv.errors import KvError, LayoutRefused
from paged_kv.geometry import INT64_MAX, as_size

from .buckets import DEFAULT_MIN_BUCKET, capacity_bucket, stride_bucket
from .commit import CommitOutcome
from .decommit import DecommitOutcome
from .graph import GraphKeepDecision, GraphLifecycle, GraphSignature
from .ledger import AdmissionRefused
from .storage import GrowthWork, KvStorage, MappedStorage

MASK_ELEMENT_SIZE = 8


@dataclass(frozen=True, slots=True)
class GrowthCounters:
    """What happened since the start.

    Attributes:
        captures: graphs captured.
        replays: steps replayed.
        invalidations: graphs that had to be given up; the first memory of a cache counts as one.
        growth_keeps: growths that kept the graph.
        growth_events: growths, the first memory not counted.
        kv_bytes_moved: by the reference's formula: a growth that moves anything counts every token of the old
            capacity, with its mask of 8 bytes.
        actual_copy_bytes: bytes that were really copied.
        grants: growths that had to ask for memory; the others found it mapped.
        refusals: growths that were refused memory.
    """

    captures: int = 0
    replays: int = 0
    invalidations: int = 0
    growth_keeps: int = 0
    growth_events: int = 0
    kv_bytes_moved: int = 0
    actual_copy_bytes: int = 0
    grants: int = 0
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class Growth:
    """One growth.

    Attributes:
        old: capacity before, tokens a row.
        new: capacity now.
        decision: what became of the graph, and why.
        billed_bytes: bytes mapped for it.
        copied_bytes: bytes copied for it.
    """

    old: int
    new: int
    decision: GraphKeepDecision
    billed_bytes: int
    copied_bytes: int


class KvGrowthController:
    """The capacity of one cache. One thread calls `ensure`; another may call `commit_ahead`.

    Args:
        storage: what holds the cache.
        hard_max: tokens a row that are never exceeded; None for what the geometry reserves.
        min_bucket: the least capacity, when it doubles.
        stride: tokens by which the capacity grows; None to double it. Where growing moves nothing, as many
            tokens as one granule of a binding holds are a good stride.
        graph: the captured graph of the decode step; None for steps that are never captured.
        plan_buffers: device addresses of the index tensors that the graph reads.

    Raises:
        InvalidGeometry: `hard_max` is more than is reserved, or a number is out of range.
    """

    def __init__(
        self,
        storage: KvStorage,
        *,
        hard_max: int | None = None,
        min_bucket: int = DEFAULT_MIN_BUCKET,
        stride: int | None = None,
        graph: GraphLifecycle | None = None,
        plan_buffers: tuple[int, ...] = (),
    ) -> None:
        reserved = storage.geometry.capacity
        self.storage = storage
        self.hard_max = reserved if hard_max is None else as_size("hard_max", hard_max, 0, reserved)
        self.min_bucket = as_size("min_bucket", min_bucket, 0, INT64_MAX)
        self.stride = None if stride is None else as_size("stride", stride, 1, INT64_MAX)
        self.graph = GraphLifecycle(enabled=False) if graph is None else graph
        self._plan_buffers = tuple(plan_buffers)
        self._signature: GraphSignature | None = None
        self._capacity = 0
        self._ahead = 0
        self._counters = GrowthCounters()
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """Tokens a row that may be written now."""
        return self._capacity

    @property
    def committed(self) -> int:
        """Tokens a row that have memory: the capacity, or more when memory was committed ahead."""
        return max(self._capacity, self._ahead)

    def capacity_for(self, tokens: int) -> int:
        """The capacity that holds `tokens` tokens a row.

        Raises:
            InvalidGeometry: not a number of tokens.
            CommitOutOfRange: beyond `hard_max`.
        """
        if self.stride is None:
            return capacity_bucket(tokens, self.hard_max, self.min_bucket)
        return stride_bucket(tokens, self.hard_max, self.stride)

    @property
    def counters(self) -> GrowthCounters:
        """A snapshot."""
        return replace(self._counters, captures=self.graph.captures, replays=self.graph.replays)

    def ensure(self, tokens: int, *, stream: int = 0) -> Growth | AdmissionRefused | None:
        """Let every row hold `tokens` tokens; None when it already can. Call it before each step.

        Args:
            tokens: what the longest row has after the step.
            stream: the stream that the step runs on; the new memory is zero in its order.

        Returns:
            None, or what grew, or why there may not be so much memory, with nothing changed.

        Raises:
            CommitOutOfRange: beyond `hard_max`.
            CaptureInProgress: this thread captures: grow before the capture begins.
            GrantOpen: this thread holds a grant.
            GraphOutOfOrder: a step of the graph is open.
            RangeQuarantined, DriverCallFailed: see `VirtualArena.commit`; nothing was published.
            ContentLost: see `MappedStorage.grow`; nothing was published, and the tokens are gone.
        """
        if type(tokens) is int and 0 <= tokens <= self._capacity:
            return None
        bucket = self.capacity_for(tokens)
        self.storage.gate.require_not_capturing()
        self.graph.require_between_steps()
        with self._lock:
            return self._grow(bucket, stream) if tokens > self._capacity else None

    def commit_ahead(
        self, tokens: int | None = None, *, stream: int = 0
    ) -> CommitOutcome | AdmissionRefused | None:
        """Back the capacity that `tokens` would need, and publish nothing; None when it is backed already.

        Made for another thread and a stream of its own. The growth that comes to it maps nothing.

        Args:
            tokens: None for the next larger capacity.
            stream: where the new memory is zeroed; the growth makes the writer's stream wait for it.

        Raises:
            CommitOutOfRange: beyond `hard_max`.
            LayoutRefused: the storage does not grow in place.
            CaptureInProgress, GrantOpen, RangeQuarantined, DriverCallFailed: see `VirtualArena.commit`.
        """
        if not isinstance(self.storage, MappedStorage):
            raise LayoutRefused(f"{type(self.storage).__name__} does not commit ahead: it grows by copying")
        target = self.capacity_for(min(self._capacity + 1, self.hard_max) if tokens is None else tokens)
        self.storage.gate.require_not_capturing()
        with self._lock:
            if target <= self.committed:
                return None
            done = self.storage.commit(target, stream)
            if not isinstance(done, AdmissionRefused):
                self._ahead = target
            return done

    def shrink(self, tokens: int) -> DecommitOutcome:
        """Keep only `tokens` tokens a row, and nothing committed ahead.

        Whatever was launched and may touch the cache must be done. The graph is judged as at a growth.

        Raises:
            InvalidGeometry: not a number of tokens.
            CommitOutOfRange: more than the capacity.
            LayoutRefused: the storage cannot shrink so far.
            CaptureInProgress, GraphOutOfOrder, WorkInFlight: not now.
        """
        if not isinstance(self.storage, MappedStorage):
            raise LayoutRefused(f"{type(self.storage).__name__} does not shrink: close it")
        kept = stride_bucket(tokens, self._capacity, 1)
        self.storage.gate.require_not_capturing()
        self.graph.require_between_steps()
        with self._lock:
            try:
                outcome = self.storage.shrink(kept)
            except KvError:  # nothing was given back
                raise
            except BaseException:  # an interrupt may come when some of it is gone
                self._apply_shrunk(kept)
                raise
            self._apply_shrunk(kept)
            return outcome

    def _apply_shrunk(self, kept: int) -> None:
        self._capacity, self._ahead = kept, 0
        if self._signature is not None and not self._judge(kept).keep:
            self._counters = replace(self._counters, invalidations=self._counters.invalidations + 1)

    def _grow(self, bucket: int, stream: int) -> Growth | AdmissionRefused:
        old = self._capacity
        work = self.storage.grow(old, bucket, stream)
        if isinstance(work, AdmissionRefused):
            self._counters = replace(self._counters, refusals=self._counters.refusals + 1)
            return work
        first = self._signature is None
        decision = self._judge(bucket)
        self._count(work, decision, old, first=first)
        self._capacity = bucket
        return Growth(old, bucket, decision, work.billed_bytes, work.copied_bytes)

    def _judge(self, capacity: int) -> GraphKeepDecision:
        """Compare what the graph has baked in with what is there at `capacity`, and give it up if need be."""
        after = replace(self.storage.signature(capacity), plan_buffers=self._plan_buffers)
        decision = GraphKeepDecision.between(self._signature, after)
        if not decision.keep:
            self.graph.invalidate()
        self._signature = after
        return decision

    def _count(self, work: GrowthWork, decision: GraphKeepDecision, old: int, *, first: bool) -> None:
        geometry, before = self.storage.geometry, self._counters
        batch = geometry.bindings[0].batch
        moved = old * batch * (geometry.bytes_per_token + MASK_ELEMENT_SIZE) if work.moved else 0
        self._counters = replace(
            before,
            invalidations=before.invalidations + (not decision.keep),
            growth_keeps=before.growth_keeps + decision.keep,
            growth_events=before.growth_events + (not first),
            kv_bytes_moved=before.kv_bytes_moved + moved,
            actual_copy_bytes=before.actual_copy_bytes + work.copied_bytes,
            grants=before.grants + work.granted,
        )
