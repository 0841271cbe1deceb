"""First come, first served: one holder of the turn at a time, which may keep it across calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paged_kv.errors import GrantOpen


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A place in the queue."""

    thread: int


class Turns:
    """Tickets in the order of asking; the first one has the turn."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._queue: deque[Ticket] = deque()

    def take(self, timeout: float) -> Ticket | None:
        """Wait for the turn, at most `timeout` seconds; None when it did not come.

        Raises:
            GrantOpen: this thread has the turn already.
        """
        me = Ticket(threading.get_ident())
        with self._condition:
            if any(other.thread == me.thread for other in self._queue):
                raise GrantOpen(
                    f"thread {me.thread} already holds a grant and would wait for itself; settle it first",
                    thread=me.thread,
                )
            self._queue.append(me)
            mine = False
            try:
                mine = self._condition.wait_for(lambda: self._queue[0] is me, timeout)
            finally:
                if not mine:  # an interrupt while waiting leaves no place behind either
                    self._apply_leave(me)
            return me if mine else None

    @contextmanager
    def turn(self, timeout: float) -> Iterator[bool]:
        """Have the turn in this block; false when it did not come in time.

        Raises:
            GrantOpen: this thread has the turn already.
        """
        ticket = self.take(timeout)
        try:
            yield ticket is not None
        finally:
            if ticket is not None:
                self.apply_pass(ticket)

    def apply_pass(self, ticket: Ticket) -> None:
        """Give the turn to the next in line."""
        with self._condition:
            self._apply_leave(ticket)

    def _apply_leave(self, ticket: Ticket) -> None:
        self._queue.remove(ticket)
        self._condition.notify_all()
