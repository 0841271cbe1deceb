"""What was launched and may still touch the cache: the reason not to unmap.

One event a stream, recorded again after every launch: a later one covers all earlier ones. When recording
fails, nothing is known about that stream any more, and it counts as busy until it was waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paged_kv.errors import ArenaClosed, DriverCallFailed, WorkInFlight

from .capture import CaptureGate
from .driver import DriverCalls, VmmDriver


class WorkFence:
    """The last launch on each stream."""

    def __init__(self, driver: VmmDriver, gate: CaptureGate) -> None:
        self._driver, self._gate = driver, gate
        self._calls = DriverCalls(driver)
        self._events: dict[int, int] = {}
        self._unknown: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()

    def record(self, stream: int) -> None:
        """Note that work which touches the cache was launched on `stream`; call it after the launch.

        The stream must not be capturing: the event would become part of the graph. Others may.

        Raises:
            ArenaClosed: it was closed, and with it what the work would touch.
            DriverCallFailed: the event could not be made or recorded; the stream counts as busy.
        """
        with self._lock:
            if self._closed:
                raise ArenaClosed("the arena was closed; launch nothing over it")
            self._unknown.add(stream)
            if stream not in self._events:
                self._events[stream] = self._calls("fence", self._driver.create_event)
            self._calls("fence", self._driver.record_event, self._events[stream], stream)
            self._unknown.discard(stream)

    @contextmanager
    def launching(self, stream: int) -> Iterator[None]:
        """Launch several things on `stream` in this block. If it is left halfway, the stream counts as busy.

        Raises:
            CaptureInProgress: this thread captures.
            DriverCallFailed: the event could not be made or recorded; the stream counts as busy.
        """
        self._gate.require_not_capturing()
        with self._lock:
            self._unknown.add(stream)
        yield
        self.record(stream)

    def busy(self) -> tuple[int, ...]:
        """Streams whose last launch is not known to be done. Waits for nothing but captures elsewhere.

        Raises:
            CaptureInProgress: this thread captures.
            DriverCallFailed: an event could not be asked.
        """
        with self._gate.memory(), self._lock:
            undone = (
                stream
                for stream, event in self._events.items()
                if stream not in self._unknown and not self._calls("fence", self._driver.event_done, event)
            )
            return tuple(sorted(self._unknown | set(undone)))

    def require_idle(self) -> None:
        """Refuse to go on while launched work may touch the cache.

        Raises:
            WorkInFlight: with the busy streams.
            DriverCallFailed: an event could not be asked.
        """
        streams = self.busy()
        if streams:
            raise WorkInFlight(
                f"work is in flight on {len(streams)} streams, first {streams[0]}; wait for it, then unmap",
                streams=streams,
            )

    def wait(self) -> None:
        """Let the host wait for everything that was launched.

        Raises:
            CaptureInProgress: this thread captures.
            DriverCallFailed: with the streams still busy.
        """
        with self._gate.memory(), self._lock:
            for stream in sorted(self._unknown):
                self._calls("fence", self._driver.synchronize, stream)
                self._unknown.discard(stream)
            for event in self._events.values():
                self._calls("fence", self._driver.wait_event, event)

    def close(self) -> None:
        """Destroy the events.

        Raises:
            DriverCallFailed: an event could not be destroyed; the others are.
        """
        first: DriverCallFailed | None = None
        with self._lock:
            self._closed = True
            while self._events:
                _, event = self._events.popitem()
                try:
                    self._calls("close", self._driver.destroy_event, event)
                except DriverCallFailed as error:
                    first = first or error
        if first is not None:
            raise first
