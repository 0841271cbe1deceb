"""The int32 tensors that tell a paged attention kernel where every token lives.

A plan is a read-only view: making one changes nothing in the manager. Everything is checked before anything
is written.

    block_table[i, c]               page of logical block c of batch row i, PAD where there is none
    slot_mapping[t]                 page * block_size + offset of query token t
    cumulative_sequence_length[i]   query tokens in front of batch row i
    past_seqlens[i]                 context - query: what is cached, not the total
    context_lens[i]                 tokens after this step
    attention_metadata              bounds, in host memory: longest query, longest context, shortest context
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .block_pool import REF
from .block_table import PAD, RESIDENT, ROW_STATE_NAMES
from .errors import (
    PagedMissingPages,
    PagedNonContiguousSequence,
    PagedQueryExceedsContext,
    PagedSharedWrite,
    PagedTableTooNarrow,
    PageNotResident,
)
from .geometry import INT32_MAX, PageGeometry, as_size
from .vectors import as_handles, as_lengths
from .view import KVView

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

SLOT_SKIP = -1
"""The slot of a token that must not be stored."""

MIN_COLUMN_BUCKET = 8


def bucket_columns(columns: int) -> int:
    """The power of two of at least 8 that holds `columns`: one captured graph serves a whole bucket."""
    return max(MIN_COLUMN_BUCKET, _power_of_two(columns))


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class PagedRequest:
    """One row of a batch: the last `query_len` of `context_len` tokens are the query."""

    handle: int
    query_len: int
    context_len: int


class Batch(NamedTuple):
    """What a plan is made from: rows and lengths, all int64 and checked.

    `stamp` is the table's last version when the plan was made: a row with a later one has changed since.

    `longest`, `most` and `least` bound the query lengths and the contexts; all are 0 for an empty batch.
    """

    slots: Int64Array
    query: Int64Array
    past: Int64Array
    context: Int64Array
    blocks: Int64Array
    num_tokens: int
    longest: int
    most: int
    least: int
    stamp: int
    epoch: int

    @property
    def is_decode(self) -> bool:
        """Whether every row has exactly one query token."""
        return self.longest == 1 and self.num_tokens == len(self.slots)


class PagedIndexPlan(NamedTuple):
    """The index tensors of one step, int32, C-contiguous and read-only.

    Attributes:
        block_table: ``(num_seqs, max_blocks)``.
        slot_mapping: ``(num_tokens,)``.
        cumulative_sequence_length: ``(num_seqs + 1,)``.
        past_seqlens: ``(num_seqs,)``.
        context_lens: ``(num_seqs,)``.
        attention_metadata: ``(3,)``: bounds on query length and context from above, on context from below.
        geometry: the pool that the ids belong to.
        batch: the rows and lengths that the plan was made from.
    """

    block_table: Int32Array
    slot_mapping: Int32Array
    cumulative_sequence_length: Int32Array
    past_seqlens: Int32Array
    context_lens: Int32Array
    attention_metadata: Int32Array
    geometry: PageGeometry
    batch: Batch

    @property
    def num_seqs(self) -> int:
        """Rows of the batch."""
        return len(self.past_seqlens)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return len(self.slot_mapping)

    @property
    def epoch(self) -> int:
        """The step that the plan was made in; 0 outside a step."""
        return self.batch.epoch

    @property
    def columns(self) -> int:
        """The most blocks that a row of this batch has."""
        return int(self.batch.blocks.max()) if self.num_seqs else 0

    @property
    def graph_key(self) -> tuple[int, int, int]:
        """What a captured graph is keyed by: batch bucket, longest query, column bucket."""
        return _power_of_two(self.num_seqs), int(self.attention_metadata[0]), bucket_columns(self.columns)

    @classmethod
    def build(
        cls,
        view: KVView,
        requests: Sequence[PagedRequest],
        *,
        max_blocks: int | None = None,
        pad: int = PAD,
        allow_shared_writes: bool = False,
        allow_window_holes: bool = False,
    ) -> PagedIndexPlan:
        """Plan any part of any rows, outside a step.

        Args:
            view: what `KVCacheManager.view` returns.
            requests: the batch, in order.
            max_blocks: columns of the block table; None for the widest row, at least one.
            pad: what cells without a page hold.
            allow_shared_writes: plan stores into pages that others can read; for a consumer that does not
                store.
            allow_window_holes: plan rows that gave up pages in front of their window.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest, PageNotResident,
            PagedNonContiguousSequence,
            PagedQueryExceedsContext, PagedMissingPages, PagedSharedWrite, PagedTableTooNarrow: see each
                class.
            InvalidGeometry: `max_blocks` is not positive, or `pad` is no int32.
        """
        if max_blocks is not None:
            max_blocks = as_size("max_blocks", max_blocks, 1, INT32_MAX)
        pad = as_size("pad", pad, -INT32_MAX - 1, INT32_MAX)
        slots = view.resolve(as_handles([request.handle for request in requests]))
        query = as_lengths([request.query_len for request in requests], len(slots), "query_len")
        context = as_lengths([request.context_len for request in requests], len(slots), "context_len")
        _require_plannable(view, slots, query, context)
        if not allow_window_holes:
            require_contiguous(view, slots)
        blocks = (context + view.geometry.block_size - 1) >> view.geometry.block_shift
        longest, most, least = (
            (int(query.max()), int(context.max()), int(context.min())) if len(slots) else (0, 0, 0)
        )
        batch = Batch(
            slots=slots,
            query=query,
            past=context - query,
            context=context,
            blocks=blocks,
            num_tokens=int(query.sum()),
            longest=longest,
            most=most,
            least=least,
            stamp=view.last_version,
            epoch=0,
        )
        if not allow_shared_writes:
            _require_exclusive(view, batch)
        return build_fresh(view, batch, max_blocks=max_blocks, pad=pad)


def _first(rows: Int64Array, bad: npt.NDArray[np.bool_]) -> tuple[int, int]:
    index = int(np.flatnonzero(bad)[0])
    return index, int(rows[index])


def require_contiguous(view: KVView, slots: Int64Array) -> None:
    """Refuse rows whose first logical block is gone.

    Raises:
        PagedNonContiguousSequence: with the first such row.
    """
    first = view.first_block[slots]
    if first.any():
        index, row = _first(slots, first != 0)
        raise PagedNonContiguousSequence(
            f"row {row} gave up its first {int(first[index])} blocks in front of its window; plan it with "
            "allow_window_holes when the kernel never reads below the window",
            row=row,
            first_block=int(first[index]),
        )


def _require_plannable(view: KVView, slots: Int64Array, query: Int64Array, context: Int64Array) -> None:
    away = view.row_state[slots] != RESIDENT
    if away.any():
        _, row = _first(slots, away)
        name = ROW_STATE_NAMES[int(view.row_state[row])]
        raise PageNotResident(f"row {row} is {name}; its pages are not on the device", row=row, state=name)
    if (query > context).any():
        index, row = _first(slots, query > context)
        raise PagedQueryExceedsContext(
            f"row {row} asks for {int(query[index])} query tokens of a context of {int(context[index])}",
            row=row,
            query=int(query[index]),
            context=int(context[index]),
        )
    held = view.n_blocks[slots] << view.geometry.block_shift
    if (context > held).any():
        index, row = _first(slots, context > held)
        raise PagedMissingPages(
            f"row {row} has pages for {int(held[index])} tokens and a context of {int(context[index])}; "
            "reserve first",
            row=row,
            held=int(held[index]),
            context=int(context[index]),
        )


def _require_exclusive(view: KVView, batch: Batch) -> None:
    pages = slots_of(view, batch) >> view.geometry.block_shift
    shared = view.claims[pages] != REF
    if shared.any():
        token, page = _first(pages.astype(np.int64), shared)
        raise PagedSharedWrite(
            f"query token {token} would be stored in page {page}, which others can read; step the row so "
            "that it gets a copy, or allow shared writes when nothing is stored",
            token=token,
            page=page,
        )


def slots_of(view: KVView, batch: Batch) -> Int32Array:
    """``page * block_size + offset`` of every query token, in batch order: ``(num_tokens,)`` int32."""
    geometry, columns = view.geometry, view.cells.shape[1]
    # A position plus the row's first cell, counted in tokens: one shift gives the cell, one mask the offset.
    start = batch.past + batch.slots * (columns << geometry.block_shift)
    if batch.is_decode:
        position = start
    else:
        start -= np.cumsum(batch.query) - batch.query
        position = np.repeat(start, batch.query)
        position += np.arange(batch.num_tokens)
    slots: Int32Array = view.flat.take(position >> geometry.block_shift)
    slots <<= geometry.block_shift
    position &= geometry.block_size - 1
    slots |= position.astype(np.int32)
    return slots


def require_columns(widest: int, columns: int) -> None:
    """Refuse a table that does not hold every block of every row.

    Raises:
        PagedTableTooNarrow: with both numbers.
    """
    if widest > columns:
        raise PagedTableTooNarrow(
            f"a row has {widest} blocks and the block table {columns} columns; use a wider table",
            needed=widest,
            columns=columns,
        )


def build_fresh(
    view: KVView, batch: Batch, *, max_blocks: int | None = None, pad: int = PAD
) -> PagedIndexPlan:
    """The plan of a checked batch in new arrays."""
    widest = int(batch.blocks.max()) if len(batch.slots) else 0
    columns = max(1, widest) if max_blocks is None else max_blocks
    require_columns(widest, columns)
    table = np.full((len(batch.slots), columns), pad, dtype=np.int32)
    table[:, :widest] = view.cells[batch.slots, :widest]
    beyond = np.arange(widest) >= batch.blocks[:, None]
    table[:, :widest][beyond | (table[:, :widest] == PAD)] = pad
    cumulative = np.zeros(len(batch.slots) + 1, dtype=np.int32)
    np.cumsum(batch.query, out=cumulative[1:])
    arrays = (
        table,
        slots_of(view, batch),
        cumulative,
        batch.past.astype(np.int32),
        batch.context.astype(np.int32),
        np.array([batch.longest, batch.most, batch.least], dtype=np.int32),
    )
    for array in arrays:
        array.flags.writeable = False
    return PagedIndexPlan(*arrays, view.geometry, batch)
