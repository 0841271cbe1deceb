"""What observers are told: which pages hold which cached content, in the order in which it happens.

Events are collected while an operation runs and delivered when it is done, so a callback always sees a
consistent manager. A callback must not call the manager (`Reentrancy`). An operation that has happened
cannot fail afterwards: what a callback raises is kept in `sink_errors` and counted, never passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal["stored", "removed", "cleared"]
MAX_SINK_ERRORS = 16


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """One change of the cached content.

    Attributes:
        number: counts all events of the manager from 1, without gaps.
        kind: ``"stored"`` when a digest is first backed by a page, ``"removed"`` when its last page is gone,
            ``"cleared"``.
        digest: the block's digest; empty for ``"cleared"``.
        page: the page that backs or backed it; -1 for ``"cleared"``.
    """

    number: int
    kind: EventKind
    digest: bytes = b""
    page: int = -1


EventSink = Callable[[KVCacheEvent], None]


@dataclass(slots=True)
class EventLog:
    """Collects events and hands them to the sinks."""

    sinks: list[EventSink] = field(default_factory=list)
    waiting: deque[KVCacheEvent] = field(default_factory=deque)
    sink_errors: deque[Exception] = field(default_factory=lambda: deque(maxlen=MAX_SINK_ERRORS))
    num_sink_errors: int = 0
    num_events: int = 0
    delivering: bool = False

    def apply_record(self, kind: EventKind, digest: bytes = b"", page: int = -1) -> None:
        """Note an event for delivery at the end of the operation."""
        self.num_events += 1
        if self.sinks:
            self.waiting.append(KVCacheEvent(self.num_events, kind, digest, page))

    def apply_deliver(self) -> None:
        """Hand all waiting events to every sink, in order."""
        self.delivering = True
        try:
            while self.waiting:
                event = self.waiting.popleft()
                for sink in self.sinks:
                    self._call(sink, event)
        finally:
            self.delivering = False

    def _call(self, sink: EventSink, event: KVCacheEvent) -> None:
        try:
            sink(event)
        except Exception as error:  # an observer cannot undo what has happened
            self.num_sink_errors += 1
            self.sink_errors.append(error)
