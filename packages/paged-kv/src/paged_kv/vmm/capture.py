"""Nobody maps memory while somebody captures a graph.

A driver call that maps, unmaps or creates memory on any thread can spoil a capture on another, so captures
exclude memory calls and the other way round, for the whole process. Captures go first: a memory call waits
while one is open or wanted. A capturing thread never waits, as it would wait for itself: it is refused.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paged_kv.errors import CaptureInProgress

_log = logging.getLogger("paged_kv.vmm")


class CaptureGate:
    """Many memory calls, or one capture.

    Example:
        >>> gate = CaptureGate()
        >>> with gate.capture():
        ...     gate.defer(lambda: print("after the capture"))
        after the capture
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._wanted = 0
        self._inside: dict[int, int] = {}
        self._deferred: deque[Callable[[], object]] = deque()
        self.deferred_errors: list[Exception] = []

    @property
    def depth(self) -> int:
        """Captures that are open, nested ones included."""
        return self._depth

    @property
    def memory_calls(self) -> int:
        """Threads that are inside `memory`."""
        return len(self._inside)

    def require_not_capturing(self) -> None:
        """Refuse the thread that captures.

        Raises:
            CaptureInProgress: the calling thread has an open capture.
        """
        if self._owner is not None and self._owner == threading.get_ident():
            raise CaptureInProgress(
                f"this thread captures (depth {self._depth}); end the capture before memory is mapped, "
                "created or given back",
                thread=self._owner,
                depth=self._depth,
            )

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture in this block. Waits for memory calls on other threads; nests on one thread.

        Raises:
            CaptureInProgress: this thread is inside `memory`, so it would wait for itself.
        """
        self._begin(threading.get_ident())
        try:
            yield
        finally:
            if self._end():
                self._drain()

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Make memory calls in this block. Waits for captures on other threads; nests on one thread.

        Raises:
            CaptureInProgress: this thread captures.
        """
        self.require_not_capturing()
        me = threading.get_ident()
        with self._condition:
            if me not in self._inside:
                self._condition.wait_for(lambda: self._owner is None and not self._wanted)
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._condition:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]
                self._condition.notify_all()

    def defer(self, callback: Callable[[], object]) -> None:
        """Call back now, or after the outermost capture if one is open. For callers that must not wait.

        An error of a callback that had to wait is logged and kept in `deferred_errors`: it has no caller.
        """
        with self._condition:
            if self._owner is not None:
                self._deferred.append(callback)
                return
        callback()

    def _begin(self, me: int) -> None:
        with self._condition:
            if self._owner == me:
                self._depth += 1
                return
            if me in self._inside:
                raise CaptureInProgress(
                    "this thread is inside a memory call and cannot begin a capture", thread=me, depth=0
                )
            self._wanted += 1
            try:
                self._condition.wait_for(lambda: self._owner is None and not self._inside)
                self._owner, self._depth = me, 1
            finally:
                self._wanted -= 1
                self._condition.notify_all()

    def _end(self) -> bool:
        with self._condition:
            self._depth -= 1
            if self._depth:
                return False
            self._owner = None
            self._condition.notify_all()
            return True

    def _drain(self) -> None:
        while True:
            with self._condition:
                if self._owner is not None or not self._deferred:
                    return
                callback = self._deferred.popleft()
            try:
                callback()
            except Exception as error:
                self.deferred_errors.append(error)
                _log.exception("a deferred callback failed")


PROCESS_GATE = CaptureGate()
