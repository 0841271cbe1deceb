"""The driver's calls for virtual memory: addresses, physical handles, and what joins them.

One method, one call, no policy: which of them may follow which is `CudaVmmDriver`'s business. Handles and
addresses are plain integers, sizes are bytes.
"""

from __future__ import annotations

from typing import Any, Protocol

from paged_cuda.errors import DriverError


class VirtualMemory(Protocol):
    """What the arena of a KV cache needs of a driver. Every failure is a `DriverError`."""

    def granularity(self, ordinal: int) -> tuple[int, int]: ...
    def reserve_addresses(self, nbytes: int, alignment: int) -> int: ...
    def free_addresses(self, pointer: int, nbytes: int) -> None: ...
    def create_handle(self, nbytes: int, ordinal: int) -> int: ...
    def release_handle(self, handle: int) -> None: ...
    def map_handle(self, pointer: int, nbytes: int, handle: int) -> None: ...
    def unmap(self, pointer: int, nbytes: int) -> None: ...
    def set_access(self, pointer: int, nbytes: int, ordinal: int, *, writable: bool) -> None: ...
    def memory_info(self) -> tuple[int, int]: ...
    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None: ...
    def event_done(self, event: int) -> bool: ...
    def stream_wait_event(self, stream: int, event: int) -> None: ...


def failure(call: str, status: Any) -> DriverError:
    """Return the error of a driver call that ended with `status`, a `CUresult`."""
    error = DriverError("driver-call", call, status.name, "CUDA_SUCCESS")
    error.code = int(status)
    return error


class BindingCalls:
    """One call of `cuda.bindings.driver`: its value, or a `DriverError`."""

    _cuda: Any

    def _call(self, name: str, *arguments: object) -> Any:
        status, *values = getattr(self._cuda, name)(*arguments)
        if int(status) != 0:
            raise failure(name, status)
        return values[0] if values else None


class VirtualMemoryCalls(BindingCalls):
    """The calls of `VirtualMemory`."""

    def granularity(self, ordinal: int) -> tuple[int, int]:
        kinds = self._cuda.CUmemAllocationGranularity_flags
        found = (
            self._call("cuMemGetAllocationGranularity", self._allocation(ordinal), kind)
            for kind in (
                kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
                kinds.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        minimum, recommended = map(int, found)
        return minimum, recommended

    def reserve_addresses(self, nbytes: int, alignment: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0))

    def free_addresses(self, pointer: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", pointer, nbytes)

    def create_handle(self, nbytes: int, ordinal: int) -> int:
        return int(self._call("cuMemCreate", nbytes, self._allocation(ordinal), 0))

    def release_handle(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map_handle(self, pointer: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", pointer, nbytes, 0, handle, 0)

    def unmap(self, pointer: int, nbytes: int) -> None:
        self._call("cuMemUnmap", pointer, nbytes)

    def set_access(self, pointer: int, nbytes: int, ordinal: int, *, writable: bool) -> None:
        flags = self._cuda.CUmemAccess_flags
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self._call("cuMemSetAccess", pointer, nbytes, [access], 1)

    def memory_info(self) -> tuple[int, int]:
        status, free, total = self._cuda.cuMemGetInfo()
        if int(status) != 0:
            raise failure("cuMemGetInfo", status)
        return int(free), int(total)

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def event_done(self, event: int) -> bool:
        (status,) = self._cuda.cuEventQuery(event)
        if status == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(status) != 0:
            raise failure("cuEventQuery", status)
        return True

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def _allocation(self, ordinal: int) -> Any:
        """Return the properties of pinned memory on that GPU."""
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        return properties
