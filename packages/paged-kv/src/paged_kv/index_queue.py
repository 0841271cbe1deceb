"""A first-in, first-out queue of small integers in two NumPy arrays, with removal from the middle.

Invariant: the entry at position ``i`` is valid if and only if ``stamp[entry] == i``. Removing writes one
    stamp and leaves
the entry behind as a dead one; dead entries are skipped when they reach the head and are compacted away
before the ring would overflow. So every operation costs what it touches, and an integer is in the queue at
most once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class IndexQueue:
    """A queue over the integers ``[0, size)``."""

    __slots__ = ("_capacity", "_head", "_ring", "_stamp", "_tail", "count")

    def __init__(self, size: int) -> None:
        self._capacity = max(1, 2 * size)
        self._ring = np.zeros(self._capacity, dtype=np.int64)
        self._stamp = np.full(size, -1, dtype=np.int64)
        self._head = 0
        self._tail = 0
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def entries(self) -> Int64Array:
        """All valid entries, first to leave first."""
        span = self._span(self._head, self._tail)
        valid: Int64Array = span[self._stamp[span] == np.arange(self._head, self._tail)]
        return valid

    def peek(self, count: int) -> tuple[Int64Array, int]:
        """The next `count` entries and the head position that taking them would leave.

        Changes nothing, so that a caller can judge and prepare before it takes.
        """
        if self._tail - self._head == self.count:
            return self._span(self._head, self._head + count), self._head + count
        found: list[Int64Array] = []
        position, missing = self._head, count
        while missing:
            stop = min(position + 2 * missing + 64, self._tail)
            span = self._span(position, stop)
            valid = np.flatnonzero(self._stamp[span] == np.arange(position, stop))[:missing]
            found.append(span[valid])
            missing -= len(valid)
            position = stop if missing else position + int(valid[-1]) + 1
        return (np.concatenate(found) if found else np.empty(0, dtype=np.int64)), position

    def apply_take(self, count: int, head: int) -> None:
        """Take the `count` entries that `peek` returned with `head`."""
        self._head = head
        self.count -= count

    def apply_push(self, values: Int64Array) -> None:
        """Append `values`, none of which may be in the queue."""
        count = len(values)
        if self._tail - self._head + count > self._capacity:
            self._apply_compact()
        start = self._tail % self._capacity
        if start + count <= self._capacity:
            self._ring[start : start + count] = values
        else:
            split = self._capacity - start
            self._ring[start:] = values[:split]
            self._ring[: count - split] = values[split:]
        self._stamp[values] = np.arange(self._tail, self._tail + count)
        self._tail += count
        self.count += count

    def apply_remove(self, values: Int64Array) -> None:
        """Remove `values`, each of which is in the queue, wherever they stand."""
        self._stamp[values] = -1
        self.count -= len(values)

    def _span(self, start: int, stop: int) -> Int64Array:
        first, last = start % self._capacity, (start % self._capacity) + stop - start
        if last <= self._capacity:
            return self._ring[first:last].copy()
        return np.concatenate((self._ring[first:], self._ring[: last - self._capacity]))

    def _apply_compact(self) -> None:
        live = self.entries()
        self._head, self._tail = 0, len(live)
        self._ring[: len(live)] = live
        self._stamp[live] = np.arange(len(live))
