"""The driver calls that a growing cache needs, as a protocol, and the one place that calls them.

A method is one driver call and no policy. Nothing here decides what may follow what: that is the arena's
business, and a driver may refuse what is impossible. Addresses, physical handles, streams and events are
plain integers, sizes are bytes. A call that fails raises any exception; what it raised becomes the cause of
`DriverCallFailed`, which names the call, the phase and the code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from paged_kv.errors import DriverCallFailed

Result = TypeVar("Result")


class VmmDriver(Protocol):
    """What this package asks of one device. `paged_kv` has `FakeVmmDriver`, `paged_cuda` the real one.

    Every method may be called from any thread. While a stream of the process captures, only these may be:
    `granularity`, `memory_info`, `create_event`, and, on a stream that does not capture and is not the
    default one, `fill`, `copy_on_device`, `record_event` and `stream_wait_event`. Even asking an event from
    another thread can spoil a capture.
    """

    def granularity(self) -> tuple[int, int]:
        """The least and the recommended size of a granule: ``cuMemGetAllocationGranularity``, twice."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device: ``cuMemGetInfo``."""
        ...

    def reserve_addresses(self, nbytes: int, alignment: int) -> int:
        """The start of a range of addresses that nothing backs yet: ``cuMemAddressReserve``."""
        ...

    def free_addresses(self, address: int, nbytes: int) -> None:
        """Give back a whole reservation with nothing mapped in it: ``cuMemAddressFree``."""
        ...

    def create_handle(self, nbytes: int) -> int:
        """Physical memory of one granule, not mapped anywhere: ``cuMemCreate``."""
        ...

    def release_handle(self, handle: int) -> None:
        """Give back physical memory that is not mapped: ``cuMemRelease``."""
        ...

    def map_handle(self, address: int, nbytes: int, handle: int) -> None:
        """Let one granule of addresses show the whole of `handle`: ``cuMemMap`` with offset 0."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Take the backing of one granule away; its handle lives on: ``cuMemUnmap``."""
        ...

    def set_access(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        """Make a run of mapped granules readable, or readable and writable: ``cuMemSetAccess``."""
        ...

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """Set bytes in the order of `stream`: ``cuMemsetD8Async``."""
        ...

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes that do not overlap in the order of `stream`: ``cuMemcpyDtoDAsync``."""
        ...

    def create_event(self) -> int:
        """An event without timing: ``cuEventCreate``. It is done until it is recorded."""
        ...

    def destroy_event(self, event: int) -> None:
        """``cuEventDestroy``."""
        ...

    def record_event(self, event: int, stream: int) -> None:
        """Done once everything on `stream` so far is: ``cuEventRecord``."""
        ...

    def event_done(self, event: int) -> bool:
        """Whether the last recorded point was reached: ``cuEventQuery``. Waits for nothing."""
        ...

    def wait_event(self, event: int) -> None:
        """Let the host wait for the event: ``cuEventSynchronize``."""
        ...

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Let later work on `stream` wait for the event: ``cuStreamWaitEvent``."""
        ...

    def synchronize(self, stream: int) -> None:
        """Let the host wait for everything on `stream`: ``cuStreamSynchronize``."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Ordinary device memory, for the storage that grows by copying: ``cuMemAlloc``."""
        ...

    def free(self, address: int) -> None:
        """Give back ordinary device memory: ``cuMemFree``."""
        ...


@dataclass(frozen=True, slots=True)
class DriverCalls:
    """Calls of one driver, each failure typed with its phase."""

    driver: VmmDriver

    def __call__(self, phase: str, call: Callable[..., Result], *arguments: int) -> Result:
        """`call(*arguments)`, or the failure as an error of this package.

        Raises:
            DriverCallFailed: the call raised; that is its cause.
        """
        try:
            return call(*arguments)
        except Exception as error:
            raise failure_of(phase, getattr(call, "__name__", "call"), error) from error


def failure_of(phase: str, name: str, error: Exception) -> DriverCallFailed:
    """What `error` of the driver call `name` means here."""
    code = getattr(error, "code", None)
    known = code if isinstance(code, int) else None
    return DriverCallFailed(
        f"the driver call {name} failed in phase {phase!r}: {error}", call=name, phase=phase, code=known
    )
