"""The baseline for growing in place: larger buffers, a copy of every token, the old buffers freed."""

from __future__ import annotations

from contextlib import suppress

from paged_kv.errors import ArenaClosed, DriverCallFailed
from paged_kv.geometry import is_integer

from .geometry import BindingGeometry, KvCacheGeometry
from .graph import BindingSignature, GraphSignature
from .handle_pool import HandlePool
from .lease import MemoryLease
from .ledger import AdmissionRefused
from .storage import GrowthWork, layout_of


class ReallocStorage:
    """A cache in ordinary buffers as large as its capacity; satisfies `KvStorage`.

    While it grows, the old and the new buffers exist.

    Args:
        geometry: the cache, all of whose bindings have one layout.
        pool: brings the driver, the governor and the gate; its handles are not used.

    Attributes:
        leaked_bytes: bytes of buffers that could not be freed; what was leased for them stays leased.

    Raises:
        InvalidGeometry: bindings of several layouts.
    """

    def __init__(self, geometry: KvCacheGeometry, pool: HandlePool) -> None:
        self.geometry, self.gate = geometry, pool.gate
        self.layout = layout_of(geometry)
        self.leaked_bytes = 0
        self._pool = pool
        self._buffers: list[int] = []
        self._capacity = 0
        self._lease: MemoryLease | None = None
        self._stuck: list[MemoryLease] = []

    @property
    def physical_bytes(self) -> int:
        """Bytes of the buffers."""
        return self._bytes(self._capacity)

    @property
    def leased_bytes(self) -> int:
        """Bytes leased of the governor."""
        return sum(lease.nbytes for lease in (self._lease, *self._stuck) if lease is not None)

    def address_of(self, binding: int) -> int:
        """The device address of a binding until the next growth.

        Raises:
            ArenaClosed: there is no such buffer now.
        """
        if not is_integer(binding) or not 0 <= binding < len(self._buffers):
            raise ArenaClosed(f"binding {binding!r} has no buffer; grow first", given=repr(binding))
        return self._buffers[binding]

    def signature(self, capacity: int) -> GraphSignature:
        """What a graph bakes in: every pointer and every shape is new after a growth."""
        return GraphSignature(
            tuple(
                BindingSignature(address, _shape(binding, capacity), False, False)
                for address, binding in zip(self._buffers, self.geometry.bindings, strict=True)
            )
        )

    def grow(self, old: int, new: int, stream: int) -> GrowthWork | AdmissionRefused:
        """Allocate, copy what the old buffers held, wait for it, and free them.

        Raises:
            CaptureInProgress: this thread captures.
            DriverCallFailed: a call failed; the old buffers are as they were.
        """
        self.gate.require_not_capturing()
        pool, total = self._pool, self._bytes(new)
        lease = pool.governor.reserve("reallocated cache", total, pool.holder.tier)
        if isinstance(lease, AdmissionRefused):
            return lease
        with self.gate.memory():
            made: list[int] = []
            try:
                copied = self._copy_into(made, old, new, stream)
            except BaseException:
                with suppress(DriverCallFailed):  # a copy may still be writing
                    pool.calls("undo", pool.driver.synchronize, stream)
                self._retire(made, new, lease)
                raise
            before, paid, stride = self._buffers, self._lease, self._capacity
            self._buffers, self._lease, self._capacity = made, lease, new
            self._retire(before, stride, paid)
        return GrowthWork(total, True, bool(before), copied)

    def close(self) -> None:
        """Free the buffers. A second call does nothing."""
        with self.gate.memory():
            buffers, paid, stride = self._buffers, self._lease, self._capacity
            self._buffers, self._lease, self._capacity = [], None, 0
            self._retire(buffers, stride, paid)

    def _bytes(self, capacity: int) -> int:
        return sum(self._sizes(capacity))

    def _sizes(self, capacity: int) -> list[int]:
        return [binding.batch * capacity * binding.bytes_per_token for binding in self.geometry.bindings]

    def _copy_into(self, made: list[int], old: int, new: int, stream: int) -> int:
        """Allocate into `made`, zero, and copy every stripe; the bytes copied."""
        calls, driver, copied = self._pool.calls, self._pool.driver, 0
        for number, (binding, nbytes) in enumerate(
            zip(self.geometry.bindings, self._sizes(new), strict=True)
        ):
            made.append(calls("allocate", driver.allocate, nbytes))
            calls("zero", driver.fill, made[-1], 0, nbytes, stream)
            unit = binding.contiguous_bytes_per_token
            for stripe in range(binding.batch * binding.fragments if self._buffers else 0):
                source = self._buffers[number] + stripe * self._capacity * unit
                calls(
                    "move", driver.copy_on_device, made[-1] + stripe * new * unit, source, old * unit, stream
                )
                copied += old * unit
        calls("publish", driver.synchronize, stream)
        return copied

    def _retire(self, buffers: list[int], capacity: int, lease: MemoryLease | None) -> None:
        """Free buffers, and give back what was leased for them, unless one of them is still there."""
        if lease is None:
            return
        self._stuck.append(lease)
        lost = 0
        for address, nbytes in zip(buffers, self._sizes(capacity), strict=False):
            try:
                self._pool.calls("free", self._pool.driver.free, address)
            except DriverCallFailed:
                lost += nbytes
        self.leaked_bytes += lost
        if not lost:
            self._stuck.remove(lease)
            lease.release()


def _shape(binding: BindingGeometry, capacity: int) -> tuple[int, ...]:
    if binding.layout.is_head_major:
        return (binding.batch, binding.kv_heads, capacity, binding.head_dim)
    return (binding.batch, capacity, binding.planes * binding.kv_heads, binding.head_dim)
