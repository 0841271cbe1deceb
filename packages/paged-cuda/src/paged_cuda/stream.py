"""Streams: what callers hand in, and one of our own for programs without another library.

A stream is an int handle or any object with `__cuda_stream__`; torch's `cuda_stream` and CuPy's `ptr` are
read too.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Protocol, runtime_checkable

from paged_cuda.device import Device, DeviceLike, resolve_device
from paged_cuda.errors import ArgumentMismatch, DriverError


@runtime_checkable
class HasCudaStream(Protocol):
    """An object that names its stream by the CUDA Python protocol."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (protocol version, stream handle)."""
        ...


StreamLike = HasCudaStream | int


def stream_handle(stream: object) -> int:
    """Return the driver's handle of `stream`.

    Raises:
        ArgumentMismatch: It is no stream.
    """
    if type(stream) is int:
        return stream
    if type(stream) is Stream:
        return stream.handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # Some libraries offer the pair as an attribute, not as a method.
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    wanted = "an int handle or an object with __cuda_stream__ (paged_cuda.Stream, torch.cuda.Stream, ...)"
    raise ArgumentMismatch("stream", "stream", type(stream).__name__, wanted)


class Stream:
    """A stream of our own, destroyed with the object.

    Args:
        device: A GPU, its ordinal, or None for the current one.
    """

    def __init__(self, device: DeviceLike = None) -> None:
        self.device: Device = resolve_device(device)
        with self.device:
            self.handle = self.device.driver.create_stream()
        weakref.finalize(self, _destroy, self.device, self.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (protocol version, stream handle)."""
        return (0, self.handle)

    def synchronize(self) -> None:
        """Wait until everything in the stream is done."""
        with self.device:
            self.device.driver.synchronize(self.handle)


def _destroy(device: Device, handle: int) -> None:
    # At the end of the process the driver may be gone before us.
    with contextlib.suppress(DriverError):
        device.driver.destroy_stream(handle)
