"""A cache that grows: its storage, the controller that grows it, and the life of the graph over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from paged_kv.errors import DriverCallFailed
from paged_kv.vmm import (
    AdmissionRefused,
    CaptureGate,
    GranuleTable,
    GraphAction,
    GraphLifecycle,
    GrowthCounters,
    HandlePool,
    KvGrowthController,
    MappedStorage,
    MemoryGovernor,
    ReallocStorage,
    VmmDriver,
)

from paged_bench.errors import BackendError
from paged_bench.residency.reader import Access, Rows
from paged_bench.residency.shapes import KvShape, Variant

_ACCESS = {
    GraphAction.EAGER: Access.LAUNCH,
    GraphAction.WARM: Access.LAUNCH,
    GraphAction.CAPTURE: Access.CAPTURE,
    GraphAction.REPLAY: Access.REPLAY,
}


def handle_pool(driver: VmmDriver, gate: CaptureGate, limit: int) -> HandlePool:
    """A pool of granules under a governor of its own, which lets at most `limit` bytes be taken.

    Raises:
        BackendError: The governor refuses.
    """
    governor = MemoryGovernor(device=limit)
    holder = governor.register("cache")
    if isinstance(holder, AdmissionRefused):
        raise BackendError("the memory governor", f"refuses the cache: {holder}")
    return HandlePool(driver, governor, holder, gate=gate)


class GrowingCache:
    """One variant of a cache, empty.

    Args:
        variant: How it is held.
        shape: Whose cache it is.
        driver: Whose memory.
        stream: Where everything is queued.
        gate: Keeps captures and memory calls apart.
    """

    def __init__(
        self, variant: Variant, shape: KvShape, driver: VmmDriver, stream: int, gate: CaptureGate
    ) -> None:
        geometry = shape.geometry(variant.layout)
        # A reallocation holds the old buffers and the new ones.
        limit = 2 * geometry.bytes_per_token * shape.capacity + (4 << 30)
        self.pool = handle_pool(driver, gate, limit)
        self.graph = GraphLifecycle(enabled=variant.capture)
        self.storage = (
            MappedStorage(geometry, self.pool) if variant.in_place else ReallocStorage(geometry, self.pool)
        )
        self._controller = KvGrowthController(
            self.storage, hard_max=shape.capacity, min_bucket=variant.min_bucket, graph=self.graph
        )
        self._variant, self._stream = variant, stream
        self.billed_bytes = 0

    @property
    def capacity(self) -> int:
        """Tokens that it can hold."""
        return self._controller.capacity

    @property
    def attributed_bytes(self) -> int:
        """Granules that each binding touches, added up; for a reallocated cache its buffers."""
        if isinstance(self.storage, MappedStorage):
            return self.storage.arena.attributed_bytes
        return self.storage.physical_bytes

    @property
    def planned_bytes(self) -> int:
        """What the planner says is mapped for the present capacity; for a reallocated cache its buffers."""
        if isinstance(self.storage, MappedStorage):
            planner = self.storage.arena.planner
            empty = GranuleTable(planner.placement)
            return planner.plan(empty, self.capacity, self.capacity).physical_bytes
        return self.storage.physical_bytes

    def counters(self) -> GrowthCounters:
        """What has happened so far."""
        return self._controller.counters

    def ensure(self, tokens: int) -> int:
        """Make room for `tokens` tokens; returns the bytes that were billed for it.

        Raises:
            BackendError: The memory is refused, by the governor or by the driver.
        """
        try:
            outcome = self._controller.ensure(tokens, stream=self._stream)
        except DriverCallFailed as error:
            what = f"a cache of {tokens} tokens"
            raise BackendError(
                what, f"cannot be had: {error}", "use --shape 0.5b, or a GPU with room"
            ) from error
        if isinstance(outcome, AdmissionRefused):
            raise BackendError(f"a cache of {tokens} tokens", f"is refused: {outcome}")
        billed = 0 if outcome is None else outcome.billed_bytes
        self.billed_bytes += billed
        return billed

    @contextmanager
    def step(self, *, prefill: bool) -> Iterator[Access]:
        """One step over the cache; a prompt takes no part in the life of the graph."""
        if prefill:
            yield Access.LAUNCH
        else:
            with self.graph.step() as action:
                capturing = action is GraphAction.CAPTURE
                with self.storage.gate.capture() if capturing else nullcontext():
                    yield _ACCESS[action]
        if isinstance(self.storage, MappedStorage):
            self.storage.arena.fence.record(self._stream)

    def rows(self, layer: int) -> Rows:
        """Where a layer's rows lie now."""
        binding = self.storage.geometry.bindings[2 * layer]
        second, width = binding.physical_shape(self.capacity)[2:]
        head_major = binding.layout.is_head_major
        token, head = (width, second * width) if head_major else (second * width, width)
        key, value = (self.storage.address_of(2 * layer + side) for side in (0, 1))
        return Rows(layer, key, value, token_stride=token, head_stride=head)

    def close(self) -> None:
        """Give everything back; nothing may be in flight."""
        self.storage.close()
        self.pool.close()
