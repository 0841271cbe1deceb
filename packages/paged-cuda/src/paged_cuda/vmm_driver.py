"""The real driver under `paged_kv.vmm`: one method, one call, on one GPU.

It decides nothing and frees nothing by itself: no finaliser here calls the driver, so an arena that is
dropped without being closed keeps its memory until the process ends. The two packages meet by structure;
neither imports the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from paged_cuda import graph
from paged_cuda.arrays import DeviceArray
from paged_cuda.device import Device, DeviceLike, resolve_device
from paged_cuda.dtypes import dtype_of
from paged_cuda.errors import ArgumentMismatch, DriverError


class CudaVmmDriver:
    """Virtual memory of one GPU, as `paged_kv.vmm.VmmDriver` asks for it.

    Every method may be called from any thread. What changes memory is refused while a `CapturedGraph` is
    being captured: the driver would take it, and nothing says that the graph would then be right.

    Args:
        device: A GPU, its ordinal, or None for the current one.

    Raises:
        NoDriver: There is no usable driver or GPU.
        DriverError: From every method: the driver refused the call; `code` is its number.
    """

    def __init__(self, device: DeviceLike = None) -> None:
        self.device: Device = resolve_device(device)
        self._calls = self.device.driver
        self._reserved: dict[int, int] = {}

    def granularity(self) -> tuple[int, int]:
        """Return the least and the recommended granule, in bytes."""
        with self.device:
            return self._calls.granularity(self.device.ordinal)

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes of the GPU; other processes count."""
        with self.device:
            return self._calls.memory_info()

    def reserve_addresses(self, nbytes: int, alignment: int) -> int:
        """Return the start of `nbytes` addresses that nothing backs yet."""
        self._refuse_capture("reserve_addresses")
        with self.device:
            address = self._calls.reserve_addresses(nbytes, alignment)
        self._reserved[address] = nbytes
        return address

    def free_addresses(self, address: int, nbytes: int) -> None:
        """Give back a whole reservation with nothing mapped in it."""
        self._refuse_capture("free_addresses")
        with self.device:
            self._calls.free_addresses(address, nbytes)
        self._reserved.pop(address, None)

    def create_handle(self, nbytes: int) -> int:
        """Return new physical memory that is not mapped anywhere."""
        self._refuse_capture("create_handle")
        with self.device:
            return self._calls.create_handle(nbytes, self.device.ordinal)

    def release_handle(self, handle: int) -> None:
        """Give physical memory back."""
        self._refuse_capture("release_handle")
        with self.device:
            self._calls.release_handle(handle)

    def map_handle(self, address: int, nbytes: int, handle: int) -> None:
        """Let `nbytes` at `address` show the whole of `handle`."""
        self._refuse_capture("map_handle")
        with self.device:
            self._calls.map_handle(address, nbytes, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take the backing of whole mappings away; work that touches them must be done."""
        self._refuse_capture("unmap")
        with self.device:
            self._calls.unmap(address, nbytes)

    def set_access(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        """Make a run of mapped addresses readable, or readable and writable, for this GPU."""
        self._refuse_capture("set_access")
        with self.device:
            self._calls.set_access(address, nbytes, self.device.ordinal, writable=writable)

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """Set bytes in the order of `stream`."""
        with self.device:
            self._calls.fill(address, byte, nbytes, stream)

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes that do not overlap in the order of `stream`."""
        with self.device:
            self._calls.copy_on_device(target, source, nbytes, stream)

    def create_event(self) -> int:
        """Return an event without timing."""
        with self.device:
            return self._calls.create_event()

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        with self.device:
            self._calls.destroy_event(event)

    def record_event(self, event: int, stream: int) -> None:
        """Mark the end of what `stream` holds so far."""
        with self.device:
            self._calls.record_event(event, stream)

    def event_done(self, event: int) -> bool:
        """Return whether the mark was reached; waits for nothing."""
        with self.device:
            return self._calls.event_done(event)

    def wait_event(self, event: int) -> None:
        """Let the host wait for the mark."""
        with self.device:
            self._calls.wait_event(event)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Let later work in `stream` wait for the mark."""
        with self.device:
            self._calls.stream_wait_event(stream, event)

    def synchronize(self, stream: int) -> None:
        """Let the host wait for everything in `stream`."""
        with self.device:
            self._calls.synchronize(stream)

    def allocate(self, nbytes: int) -> int:
        """Return ordinary device memory."""
        self._refuse_capture("allocate")
        with self.device:
            return self._calls.allocate(nbytes)

    def free(self, address: int) -> None:
        """Give ordinary device memory back."""
        self._refuse_capture("free")
        with self.device:
            self._calls.free(address)

    def array(
        self,
        address: int,
        shape: Sequence[int],
        dtype: str,
        *,
        strides: Sequence[int] | None = None,
        owner: object = None,
    ) -> DeviceArray:
        """Return reserved addresses as an array for the operator, DLPack and the CUDA array interface.

        The array may reach beyond what is committed: its shape, and with it a captured graph, then stays as
        it is while the cache grows. A kernel that touches what is not committed faults, and takes the context
        along.

        Args:
            address: The first element.
            shape: Extents.
            dtype: ONNX type name.
            strides: Steps in elements, as of a sequence- or head-major layout; row-major by default.
            owner: What must live as long as the array; closing it is not prevented.

        Raises:
            ArgumentMismatch: A part of the array lies outside every reservation of this object.
        """
        found = DeviceArray.from_pointer(address, shape, dtype, self.device, strides=strides)
        low = high = address
        if 0 not in found.shape:
            itemsize = dtype_of(dtype).itemsize
            spans = [(extent - 1) * step for extent, step in zip(found.shape, found.strides, strict=True)]
            low += itemsize * sum(span for span in spans if span < 0)
            high += itemsize * (1 + sum(span for span in spans if span > 0))
        reserved = tuple(self._reserved.items())  # other threads may reserve meanwhile
        if not any(start <= low and high <= start + size for start, size in reserved):
            got = f"bytes from {low:#x} to {high:#x}"
            raise ArgumentMismatch("reservation", "address", got, "addresses inside one reservation")
        found.owner = (self, owner)
        return found

    def _refuse_capture(self, call: str) -> None:
        if graph.capturing():
            raise DriverError("capture", call, "an open capture", "a call before or after the capture")


__all__ = ["CudaVmmDriver"]
