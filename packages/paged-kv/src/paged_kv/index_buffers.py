"""Index tensors in the caller's memory: constant addresses and shapes, kept up to date by small writes.

A captured graph reads these buffers whole: rows and tokens beyond the batch must be harmless after every
shrink. So each output row remembers the version it shows and how many columns are filled; the same version
means that only new columns are written, and rows that the batch lost are padded again at once. Two steps in
flight need two `IndexPlanBuffers`, each with its own memory of what it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from .block_table import PAD
from .errors import InvalidGeometry, PagedBufferTooSmall
from .geometry import INT32_MAX, as_size
from .index_plan import SLOT_SKIP, Batch, PagedIndexPlan, require_columns, slots_of
from .view import KVView

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

ALIGNMENT = 64
NOTHING_SHOWN = 0
NEVER = -1


class PadPolicy(Enum):
    """What a padded row's first column holds."""

    PAD = "pad"
    NULL_PAGE = "null page"


@dataclass(frozen=True, slots=True, eq=False)
class DirtyRanges:
    """Block table cells that the last plan wrote: columns ``[first[i], last[i])`` of output row ``rows[i]``.

    `bulk` says that half of the rows or more changed, so that one copy of the whole table is the cheaper
    upload.
    """

    rows: Int64Array
    first: Int64Array
    last: Int64Array
    bulk: bool


class IndexPlanBuffers:
    """Memory for the index tensors of every batch that fits in it.

    Attributes:
        block_table: ``(max_batch, max_blocks)`` int32, read-only view.
        slot_mapping: ``(max_tokens,)`` int32.
        cumulative_sequence_length: ``(max_batch + 1,)`` int32.
        past_seqlens: ``(max_batch,)`` int32.
        context_lens: ``(max_batch,)`` int32.
        attention_metadata: ``(3,)`` int32.

    Args:
        max_batch: rows.
        max_tokens: query tokens.
        max_blocks: columns; `bucket_columns` gives a width that serves many lengths.
        pad: what cells without a page hold.
        policy: what column 0 of a padded row holds.
        memory: a writable buffer of at least `bytes_for` bytes, such as pinned memory; None to allocate.

    Raises:
        InvalidGeometry: a size is not a positive int32, `pad` is no int32, or `memory` is too small,
            read-only, not contiguous or not aligned to 4 bytes.
    """

    __slots__ = (
        *("block_table", "slot_mapping", "cumulative_sequence_length", "past_seqlens", "context_lens"),
        *("attention_metadata", "max_batch", "max_tokens", "max_blocks", "pad", "policy"),
        *("_cells", "_slots", "_starts", "_past", "_context", "_bounds"),
        *(
            "_counting",
            "_shown",
            "_filled",
            "_last_slots",
            "_last_stamp",
            "_rows",
            "_tokens",
            "_view",
            "_written",
        ),
    )

    def __init__(
        self,
        max_batch: int,
        max_tokens: int,
        max_blocks: int,
        *,
        pad: int = PAD,
        policy: PadPolicy = PadPolicy.PAD,
        memory: object | None = None,
    ) -> None:
        max_batch = as_size("max_batch", max_batch, 1, INT32_MAX - 1)
        max_tokens = as_size("max_tokens", max_tokens, 1, INT32_MAX)
        max_blocks = as_size("max_blocks", max_blocks, 1, INT32_MAX)
        pad = as_size("pad", pad, -INT32_MAX - 1, INT32_MAX)
        self.max_batch, self.max_tokens, self.max_blocks = max_batch, max_tokens, max_blocks
        self.pad, self.policy = pad, policy
        sizes = _sizes(max_batch, max_tokens, max_blocks)
        words = _words(memory, self.bytes_for(max_batch, max_tokens, max_blocks))
        offset, parts = 0, []
        for size in sizes:
            parts.append(words[offset : offset + size])
            offset += _aligned(size)
        cells, self._slots, self._starts, self._past, self._context, self._bounds = parts
        self._cells = cells.reshape(max_batch, max_blocks)
        self.block_table = _read_only(self._cells)
        self.slot_mapping = _read_only(self._slots)
        self.cumulative_sequence_length = _read_only(self._starts)
        self.past_seqlens = _read_only(self._past)
        self.context_lens = _read_only(self._context)
        self.attention_metadata = _read_only(self._bounds)
        self._counting = np.arange(max_batch + 1, dtype=np.int32)
        self._shown = np.zeros(max_batch, dtype=np.int64)
        self._filled = np.zeros(max_batch, dtype=np.int64)
        self._view: KVView | None = None
        self.invalidate()

    @staticmethod
    def bytes_for(max_batch: int, max_tokens: int, max_blocks: int) -> int:
        """Bytes of memory that the six tensors take, each starting on a 64-byte boundary."""
        return 4 * sum(_aligned(size) for size in _sizes(max_batch, max_tokens, max_blocks))

    def invalidate(self) -> None:
        """Pad everything and forget what is shown; for memory that somebody else wrote to."""
        self._cells[:] = self.pad
        if self.policy is PadPolicy.NULL_PAGE:
            self._cells[:, 0] = 0
        self._slots[:] = SLOT_SKIP
        for array in (self._starts, self._past, self._context, self._bounds):
            array[:] = 0
        self._shown[:] = NOTHING_SHOWN
        self._filled[:] = self._base
        self._rows = self._tokens = 0
        self._last_slots: Int64Array | None = None
        self._last_stamp = NEVER
        self._written: Callable[[], DirtyRanges] = self._everything

    @property
    def _base(self) -> int:
        """Columns that a padded row fills."""
        return 1 if self.policy is PadPolicy.NULL_PAGE else 0

    def dirty(self) -> DirtyRanges:
        """The cells that the last plan wrote; every one after the first plan or `invalidate`."""
        return self._written()

    def _everything(self) -> DirtyRanges:
        rows = np.arange(self.max_batch)
        return DirtyRanges(rows, np.zeros_like(rows), np.full_like(rows, self.max_blocks), True)

    def emit(self, view: KVView, batch: Batch) -> PagedIndexPlan:
        """Show a checked batch; used by `StepTransaction.plan`.

        Raises:
            PagedBufferTooSmall, PagedTableTooNarrow: the batch does not fit; nothing was written.
            InvalidGeometry: the padding policy needs a null page and the pool has none.
        """
        self._require_room(view, batch)
        if self._view is not view:
            self.invalidate()
            self._view = view
        slots = slots_of(view, batch)
        self._apply_lengths(batch, slots)
        self._apply_table(view, batch)
        rows, tokens = len(batch.slots), batch.num_tokens
        return PagedIndexPlan(
            self.block_table[:rows],
            self.slot_mapping[:tokens],
            self.cumulative_sequence_length[: rows + 1],
            self.past_seqlens[:rows],
            self.context_lens[:rows],
            self.attention_metadata,
            view.geometry,
            batch,
        )

    def _require_room(self, view: KVView, batch: Batch) -> None:
        rows = len(batch.slots)
        if rows > self.max_batch or batch.num_tokens > self.max_tokens:
            raise PagedBufferTooSmall(
                f"the batch has {rows} rows and {batch.num_tokens} tokens, the buffers hold "
                f"{self.max_batch} and {self.max_tokens}",
                rows=rows,
                tokens=batch.num_tokens,
                max_batch=self.max_batch,
                max_tokens=self.max_tokens,
            )
        require_columns(view.geometry.blocks_for(batch.most), self.max_blocks)
        if self.policy is PadPolicy.NULL_PAGE and not view.geometry.null_page:
            raise InvalidGeometry("PadPolicy.NULL_PAGE needs a pool with a null page", null_page=False)

    def _apply_lengths(self, batch: Batch, slots: Int32Array) -> None:
        rows, tokens = len(batch.slots), batch.num_tokens
        self._slots[:tokens] = slots
        self._past[:rows] = batch.past
        self._context[:rows] = batch.context
        if batch.is_decode:
            self._starts[: rows + 1] = self._counting[: rows + 1]
        else:
            np.cumsum(batch.query, out=self._starts[1 : rows + 1])
        self._starts[rows + 1 :] = tokens
        self._bounds[0], self._bounds[1], self._bounds[2] = batch.longest, batch.most, batch.least
        if tokens < self._tokens:
            self._slots[tokens : self._tokens] = SLOT_SKIP
        if rows < self._rows:
            self._past[rows : self._rows] = 0
            self._context[rows : self._rows] = 0
        self._tokens = tokens

    def _apply_table(self, view: KVView, batch: Batch) -> None:
        rows = len(batch.slots)
        filled, changed = self._filled[:rows], None
        unchanged = batch.slots is self._last_slots and batch.stamp == self._last_stamp
        self._last_slots = None  # should anything below fail, the next plan compares row by row
        if not unchanged:
            versions = view.version[batch.slots]
            same = self._shown[:rows] == versions
            if np.count_nonzero(same) != rows:
                changed = np.flatnonzero(~same)
                filled = np.where(same, filled, batch.blocks)
        grown = (filled != batch.blocks).nonzero()[0]
        first = filled[grown]
        self._apply_grown(view, batch, grown, first)
        if changed is not None:
            self._apply_changed(view, batch, changed)
        if rows < self._rows:
            self._apply_lost(rows)
        lost, self._rows = self._rows - rows, rows
        if self._last_stamp == NEVER:
            self._written = self._everything
        else:
            self._written = lambda: self._ranges(batch, grown, first, changed, max(0, lost))
        self._filled[:rows] = batch.blocks
        if changed is not None:
            self._shown[:rows] = versions
        self._last_slots, self._last_stamp = batch.slots, batch.stamp

    def _apply_grown(self, view: KVView, batch: Batch, rows: Int64Array, first: Int64Array) -> None:
        if not len(rows):
            return
        # Every count is at least one, so the sum shows whether all are one.
        if int((batch.blocks[rows] - first).sum()) == len(rows):
            self._cells[rows, first] = view.cells[batch.slots[rows], first]
            return
        for row, start, stop in zip(rows, first, batch.blocks[rows], strict=True):
            self._cells[row, start:stop] = view.cells[batch.slots[row], start:stop]

    def _apply_changed(self, view: KVView, batch: Batch, rows: Int64Array) -> None:
        self._shown[rows] = (
            NOTHING_SHOWN  # should the copy below fail, these rows are written again next time
        )
        columns = view.cells.shape[1]
        width = min(self.max_blocks, columns, int(max(batch.blocks[rows].max(), self._filled[rows].max())))
        if len(rows) == len(batch.slots) and columns == self.max_blocks and 2 * width > columns:
            target = self._cells[: len(rows)]
            np.take(view.cells, batch.slots, axis=0, out=target, mode="clip")
        else:
            target = view.cells[batch.slots[rows], :width]
            self._cells[rows, :width] = target
        if self.pad != PAD:
            shown = self._cells[rows, :width]
            shown[shown == PAD] = self.pad
            self._cells[rows, :width] = shown

    def _apply_lost(self, rows: int) -> None:
        lost = slice(rows, self._rows)
        self._cells[lost, : int(self._filled[lost].max())] = self.pad
        if self.policy is PadPolicy.NULL_PAGE:
            self._cells[lost, 0] = 0
        self._shown[lost] = NOTHING_SHOWN
        self._filled[lost] = self._base

    def _ranges(
        self, batch: Batch, grown: Int64Array, first: Int64Array, changed: Int64Array | None, lost: int
    ) -> DirtyRanges:
        whole = np.arange(len(batch.slots), len(batch.slots) + lost)
        if changed is not None:
            whole = np.concatenate((changed, whole))
        rows = np.concatenate((grown, whole))
        starts = np.concatenate((first, np.zeros(len(whole), dtype=np.int64)))
        stops = np.concatenate((batch.blocks[grown], np.full(len(whole), self.max_blocks)))
        return DirtyRanges(rows, starts, stops, 2 * len(rows) >= max(1, len(batch.slots)))


def _sizes(max_batch: int, max_tokens: int, max_blocks: int) -> tuple[int, ...]:
    return max_batch * max_blocks, max_tokens, max_batch + 1, max_batch, max_batch, 3


def _aligned(words: int) -> int:
    step = ALIGNMENT // 4
    return -(-words // step) * step


def _words(memory: object | None, needed: int) -> Int32Array:
    if memory is None:
        return np.empty(needed // 4, dtype=np.int32)
    try:
        raw: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)  # type: ignore[call-overload]
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidGeometry(f"the memory is not a contiguous buffer: {error}", needed=needed) from error
    if len(raw) < needed or not raw.flags.writeable:
        raise InvalidGeometry(
            f"the memory has {len(raw)} bytes, writable: {raw.flags.writeable}; "
            f"{needed} writable bytes are needed",
            given=len(raw),
            needed=needed,
        )
    words = raw[:needed].view(np.int32)
    if not words.flags.aligned:
        raise InvalidGeometry("the memory does not start on a 4-byte boundary", alignment=4)
    return words


def _read_only(array: Int32Array) -> Int32Array:
    view = array.view()
    view.flags.writeable = False
    return view
