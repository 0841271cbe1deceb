"""A captured step: recorded once, replayed with whatever lengths the device memory then holds.

The graph keeps every array, workspace and kernel it was captured with alive for as long as it lives.
"""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType

from paged_cuda.device import Device, DeviceLike, resolve_device
from paged_cuda.errors import DriverError, GraphClosed
from paged_cuda.stream import Stream, StreamLike, stream_handle

# Captures that are open now, in any thread. Keeping an array alive for one capture too many does no harm.
_open: list[CapturedGraph] = []


def retain(*operands: object) -> bool:
    """Keep `operands` alive with every open capture; return whether there is one."""
    for graph in _open:
        graph._operands.append(operands)
    return bool(_open)


def capturing() -> bool:
    """Return whether a capture of this package is open, in any thread."""
    return bool(_open)


class CapturedGraph:
    """Captures what its `with` block launches in `stream`, then replays it.

    Operators must be prepared before. Lengths, tables and slots may change between replays; addresses may
    not.

    Args:
        stream: Where to capture; also where `replay` runs by default. Not the legacy default stream.
        device: The GPU; by default the stream's own or the current one.
    """

    def __init__(self, stream: StreamLike, *, device: DeviceLike = None) -> None:
        own = stream.device if isinstance(stream, Stream) else None
        self.device: Device = resolve_device(device if device is not None else own)
        self._stream = stream
        self._handle = stream_handle(stream)
        self._operands: list[object] = []
        self._executable = 0
        self._finalizer: weakref.finalize[..., CapturedGraph] | None = None

    def __enter__(self) -> CapturedGraph:
        if self._executable:
            raise GraphClosed(
                "graph", "CapturedGraph", "a second capture", "one capture an object; make another"
            )
        with self.device:
            self.device.driver.begin_capture(self._handle)
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.remove(self)
        if error is not None:
            self._abandon()
            return
        driver = self.device.driver
        with self.device:
            graph = driver.end_capture(self._handle)
            try:
                self._executable = driver.instantiate(graph)
            finally:
                driver.destroy_graph(graph)
            driver.upload_graph(self._executable, self._handle)
        self._finalizer = weakref.finalize(self, _destroy, self.device, self._executable)

    def replay(self, stream: StreamLike | None = None) -> None:
        """Launch the captured step.

        Raises:
            GraphClosed: Nothing was captured yet, or the graph was closed.
        """
        if not self._executable:
            raise GraphClosed("graph", "CapturedGraph.replay", "no captured work", "a finished, open capture")
        driver, handle = self.device.driver, self._handle if stream is None else stream_handle(stream)
        driver.push_context(self.device.context)
        try:
            driver.launch_graph(self._executable, handle)
        finally:
            driver.pop_context()

    def close(self) -> None:
        """Destroy the graph and let its operands go. Replays in flight must be done."""
        if self._finalizer is not None:
            self._finalizer()
        self._executable = 0
        self._operands.clear()

    def _abandon(self) -> None:
        # What broke the capture is already on its way to the caller; a second error would hide it.
        with contextlib.suppress(DriverError), self.device:
            self.device.driver.destroy_graph(self.device.driver.end_capture(self._handle))
        self._operands.clear()


def _destroy(device: Device, executable: int) -> None:
    with contextlib.suppress(DriverError), device:
        device.driver.destroy_executable(executable)
