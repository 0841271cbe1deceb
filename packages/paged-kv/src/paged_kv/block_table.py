"""Rows of physical page ids, as a structure of arrays.

A row is one sequence. Its live cells are the absolute logical columns ``[first_block, n_blocks)``; every
other cell is PAD. A handle is an int64 of manager tag, generation and row, so that a stale or foreign one
is seen by one vector comparison. `version` takes a fresh value from one counter at every change of a row
that is not an append: two equal versions mean that the same sequence still has the same cells, and perhaps
more of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index

import numpy as np
import numpy.typing as npt

from .errors import NoFreeRow, PagedDuplicateRequest, StaleSequenceHandle, UnknownSequence
from .index_queue import IndexQueue

Int64Array = npt.NDArray[np.int64]

PAD = -1
SLOT_BITS = 24
GENERATION_BITS = 24
SLOT_MASK = (1 << SLOT_BITS) - 1
GENERATION_MASK = (1 << GENERATION_BITS) - 1
TAG_MASK = (1 << 15) - 1
MAX_ROWS = 1 << SLOT_BITS

FREE, RESIDENT, SWAPPING_OUT, SWAPPED, SWAPPING_IN = range(5)
ROW_STATE_NAMES = ("free", "resident", "swapping out", "swapped", "swapping in")


@dataclass(slots=True)
class BlockTable:
    """`num_rows` rows of at most `num_columns` pages."""

    num_rows: int
    num_columns: int
    tag: int
    cells: npt.NDArray[np.int32] = field(init=False)
    flat: npt.NDArray[np.int32] = field(init=False)
    handle: Int64Array = field(init=False)
    ready: Int64Array = field(init=False)
    state: npt.NDArray[np.uint8] = field(init=False)
    generation: Int64Array = field(init=False)
    seq_len: Int64Array = field(init=False)
    settled: Int64Array = field(init=False)
    n_blocks: Int64Array = field(init=False)
    first_block: Int64Array = field(init=False)
    window: Int64Array = field(init=False)
    version: Int64Array = field(init=False)
    cut: Int64Array = field(init=False)
    promised: Int64Array = field(init=False)
    tenant: Int64Array = field(init=False)
    preemptions: Int64Array = field(init=False)
    free: IndexQueue = field(init=False)
    num_advanced: int = field(init=False, default=0)
    last_version: int = field(init=False, default=0)
    departures: int = field(init=False, default=0)
    tail_shared: npt.NDArray[np.bool_] = field(init=False)
    _scratch: Int64Array = field(init=False)
    _order: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        rows = self.num_rows
        self.cells = np.full((rows, self.num_columns), PAD, dtype=np.int32)
        self.flat = self.cells.reshape(-1)
        for name in ("handle", "ready", "tenant"):
            setattr(self, name, np.full(rows, -1, dtype=np.int64))
        for name in (
            *("generation", "seq_len", "settled", "n_blocks", "first_block", "window"),
            *("version", "cut", "promised", "preemptions", "_scratch"),
        ):
            setattr(self, name, np.zeros(rows, dtype=np.int64))
        self.state = np.zeros(rows, dtype=np.uint8)
        self.tail_shared = np.zeros(rows, dtype=np.bool_)
        self._order = np.arange(rows, dtype=np.int64)
        self.free = IndexQueue(rows)
        self.free.apply_push(np.arange(rows, dtype=np.int64))

    @property
    def num_used(self) -> int:
        """Rows that hold a sequence."""
        return self.num_rows - self.free.count

    def resolve(self, handles: Int64Array) -> Int64Array:
        """Row numbers of `handles`, each of which must be current.

        Raises:
            UnknownSequence: not a handle of this manager.
            StaleSequenceHandle: the sequence was released.
        """
        slots = handles & SLOT_MASK
        # A free row's own mark is negative, so it would equal itself without the sign test.
        current = (self.handle.take(slots, mode="clip") == handles) & (handles >= 0)
        if np.count_nonzero(current) != len(handles):
            self._refuse_handle(int(handles[np.flatnonzero(~current)[0]]))
        return slots

    def _refuse_handle(self, handle: int) -> None:
        slot, tag = handle & SLOT_MASK, handle >> (SLOT_BITS + GENERATION_BITS)
        generation = (handle >> SLOT_BITS) & GENERATION_MASK
        if (
            handle < 0
            or slot >= self.num_rows
            or tag != self.tag
            or not 0 < generation <= self.generation[slot]
        ):
            raise UnknownSequence(
                f"{handle} is not a handle of this manager; use what create or admit returned", handle=handle
            )
        raise StaleSequenceHandle(
            f"handle {handle} names row {slot} at generation {generation}, which was released; the row is at "
            f"generation {int(self.generation[slot])}",
            handle=handle,
            row=slot,
            generation=generation,
            current=int(self.generation[slot]),
        )

    def resolve_one(self, handle: int | np.integer) -> int:
        """The row number of one handle; see `resolve`."""
        try:
            number = index(handle)
        except TypeError as error:
            raise UnknownSequence(f"{handle!r} is not a handle", handle=repr(handle)) from error
        slot = number & SLOT_MASK
        if number < 0 or slot >= self.num_rows or self.handle[slot] != number:
            self._refuse_handle(number)
        return slot

    def require_distinct(self, slots: Int64Array) -> None:
        """Refuse a batch that names a row twice.

        Raises:
            PagedDuplicateRequest: with the first such row.
        """
        order = self._order[: len(slots)] if len(slots) <= self.num_rows else np.arange(len(slots))
        self._scratch[slots] = order
        same = self._scratch.take(slots) == order
        if np.count_nonzero(same) != len(slots):
            row = int(slots[np.flatnonzero(~same)[0]])
            raise PagedDuplicateRequest(f"row {row} appears more than once in the batch", row=row)

    def choose_rows(self, count: int) -> tuple[Int64Array, int]:
        """The next `count` free rows and the queue position that taking them leaves.

        Raises:
            NoFreeRow: fewer than `count` are free.
        """
        if count > self.free.count:
            raise NoFreeRow(
                f"{count} sequences asked for, {self.free.count} of {self.num_rows} rows are free; "
                "release some, or build the manager with a larger max_sequences",
                needed=count,
                available=self.free.count,
            )
        return self.free.peek(count)

    def next_handles(self, slots: Int64Array) -> Int64Array:
        """The handles that `apply_open` will give the free rows `slots`."""
        generation = self.generation[slots] % GENERATION_MASK + 1
        generation <<= SLOT_BITS
        generation |= self.tag << (SLOT_BITS + GENERATION_BITS)
        generation |= slots
        return generation

    def next_handle(self, slot: int) -> int:
        """As `next_handles`, for one row."""
        generation = int(self.generation[slot]) % GENERATION_MASK + 1
        return (self.tag << (SLOT_BITS + GENERATION_BITS)) | (generation << SLOT_BITS) | slot

    def apply_open(self, slots: Int64Array, head: int, handles: Int64Array, window: int = 0) -> None:
        """Make the chosen free rows empty sequences."""
        self.free.apply_take(len(slots), head)
        self.generation[slots] = (handles >> SLOT_BITS) & GENERATION_MASK
        self.handle[slots] = handles
        self.ready[slots] = handles
        self.state[slots] = RESIDENT
        self.window[slots] = window
        self.apply_touch(slots)

    def apply_open_one(self, slot: int, handle: int, window: int) -> None:
        """As `apply_open`, for one row that was taken from the queue before."""
        self.generation[slot] = (handle >> SLOT_BITS) & GENERATION_MASK
        self.handle[slot] = self.ready[slot] = handle
        self.state[slot] = RESIDENT
        self.window[slot] = window
        self.last_version += 1
        self.version[slot] = self.last_version

    def apply_close(self, slots: Int64Array) -> None:
        """Free the rows; their live cells were taken back before."""
        self.num_advanced -= int(np.count_nonzero(self.first_block[slots]))
        for array in (
            self.seq_len,
            self.settled,
            self.n_blocks,
            self.first_block,
            self.window,
            self.promised,
            self.preemptions,
        ):
            array[slots] = 0
        self.tail_shared[slots] = False
        self.handle[slots] = -1
        self.apply_set_away(slots)
        self.tenant[slots] = -1
        self.state[slots] = FREE
        self.apply_touch(slots)
        self.free.apply_push(slots)

    def apply_set_away(self, slots: Int64Array) -> None:
        """Note that the rows cannot be planned until `ready` holds their handles again."""
        self.ready[slots] = -1
        self.departures += 1

    def apply_touch(self, slots: Int64Array) -> None:
        """Give each row a version that no row ever had."""
        count = len(slots)
        self.version[slots] = np.arange(self.last_version + 1, self.last_version + 1 + count)
        self.last_version += count

    def span(self, slots: Int64Array, start: Int64Array, stop: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Flat cells of columns ``[start, stop)`` of each row, last column first, and their batch indices."""
        lengths = stop - start
        ends = np.cumsum(lengths)
        batch = np.repeat(np.arange(len(slots)), lengths)
        column = ends[batch] - 1 - np.arange(int(ends[-1]) if len(ends) else 0) + start[batch]
        return slots[batch] * self.num_columns + column, batch
