"""What measuring needs of the driver beyond what the operator does: timed events, memory, facts of the GPU.

A protocol with one real implementation, so that everything above it runs against a fake without a GPU.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

from paged_cuda import DriverError


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the driver says of a GPU and the record keeps.

    Attributes:
        uuid: The driver's 16 bytes, as lower-case hexadecimal digits.
        l2_bytes: Second-level cache.
        memory_bytes: Device memory.
    """

    uuid: str
    l2_bytes: int
    memory_bytes: int

    @property
    def uuid_sha256(self) -> str:
        """A digest that tells GPUs apart and does not name them."""
        return hashlib.sha256(self.uuid.encode()).hexdigest()


class Counters(Protocol):
    """Timed events and memory, on the GPU whose context is current."""

    def create_event(self) -> int:
        """Return an event that records time."""
        ...

    def destroy_event(self, event: int) -> None:
        """Destroy it."""
        ...

    def record_event(self, event: int, stream: int) -> None:
        """Put it into the stream."""
        ...

    def elapsed_us(self, begin: int, end: int) -> float:
        """Return microseconds between two events that have passed."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of device memory."""
        ...

    def facts(self, ordinal: int) -> GpuFacts:
        """Return what is fixed about a GPU."""
        ...


class CudaCounters:
    """The driver's own. Make one only after `paged_cuda.require_driver` has found a driver."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._cuda = driver

    def _call(self, name: str, *arguments: object) -> Any:
        status, *values = getattr(self._cuda, name)(*arguments)
        if int(status) != 0:
            raise DriverError("driver-call", name, status.name, "CUDA_SUCCESS")
        return values[0] if len(values) == 1 else values

    def create_event(self) -> int:
        """Return an event that records time."""
        return int(self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DEFAULT))

    def destroy_event(self, event: int) -> None:
        """Destroy it."""
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """Put it into the stream."""
        self._call("cuEventRecord", event, stream)

    def elapsed_us(self, begin: int, end: int) -> float:
        """Return microseconds between two events that have passed."""
        return float(self._call("cuEventElapsedTime", begin, end)) * 1e3

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of device memory."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def facts(self, ordinal: int) -> GpuFacts:
        """Return what is fixed about a GPU."""
        device = self._call("cuDeviceGet", ordinal)
        kind = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        return GpuFacts(
            uuid=bytes(self._call("cuDeviceGetUuid", device).bytes).hex(),
            l2_bytes=int(self._call("cuDeviceGetAttribute", kind, device)),
            memory_bytes=int(self._call("cuDeviceTotalMem", device)),
        )
