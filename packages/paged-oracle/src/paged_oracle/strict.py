"""What ONNX Runtime does not check and leaves undefined, refused.

Invariant: this layer only ever refuses more than ONNX Runtime does. It reads values and never changes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from paged_schema import Call

from paged_oracle.dtypes import Array, Int64
from paged_oracle.errors import UndefinedInputError
from paged_oracle.resolve import BoundCall

Violation = tuple[str, str, str, str]


def require_defined(bound: BoundCall) -> None:
    """Raise `UndefinedInputError` for the first value that has no defined meaning.

    Rules, in order: ``cumulative-start``, ``cumulative-order``, ``cumulative-end``, ``past-negative``,
    ``context-capacity`` (past and new tokens fit the block table), ``rotary-rows``, ``block-range``,
    ``block-mapped`` (every position that is read or written has a block), ``slot-range`` (-1 is fine),
    ``slot-unique``, ``cache-overlap``, ``scale-positive`` and ``metadata-bound``.
    """
    for violation in _violations(bound):
        raise UndefinedInputError(*violation)


def _violations(bound: BoundCall) -> Iterator[Violation]:
    call, arrays = bound.call, bound.arrays
    cumulative, past, table = (
        arrays[name].astype(np.int64)
        for name in ("cumulative_sequence_length", "past_seqlens", "block_table")
    )
    num_blocks, block_size = bound.num_blocks, bound.block_size
    yield from _ragged(cumulative, past, bound.tokens)
    lengths = np.diff(cumulative)
    contexts = np.where(lengths > 0, past + lengths, 0)
    yield from _contexts(bound, contexts, table.shape[1] * block_size)
    yield from _blocks(call, table, past, lengths, num_blocks, block_size)
    if "slot_mapping" in arrays:
        yield from _slots("slot_mapping", arrays["slot_mapping"].astype(np.int64), num_blocks * block_size)
    else:
        slots = _derived_slots(table, past, lengths, block_size)
        yield from _slots("block_table", slots, num_blocks * block_size)
    yield from _storage(arrays)
    if "attention_metadata" in arrays:
        yield from _metadata(arrays["attention_metadata"].astype(np.int64), lengths, contexts)


def _ragged(cumulative: Int64, past: Int64, tokens: int) -> Iterator[Violation]:
    name = "cumulative_sequence_length"
    if cumulative[0] != 0:
        yield "cumulative-start", name, f"starts at {cumulative[0]}", "a start at 0"
    for b in np.flatnonzero(np.diff(cumulative) < 0):
        yield "cumulative-order", name, f"falls from {cumulative[b]} to {cumulative[b + 1]}", "no decrease"
    if cumulative[-1] != tokens:
        yield "cumulative-end", name, f"ends at {cumulative[-1]}", f"an end at the {tokens} rows of query"
    for b in np.flatnonzero(past < 0):
        yield "past-negative", "past_seqlens", f"{past[b]} at {b}", "0 or more"


def _contexts(bound: BoundCall, contexts: Int64, capacity: int) -> Iterator[Violation]:
    for b in np.flatnonzero(contexts > capacity):
        got = f"sequence {b} needs {contexts[b]} positions"
        yield "context-capacity", "block_table", got, f"at most the {capacity} of its columns"
    if bound.call.rotary and contexts.max() > bound.rotary_rows:
        got = f"{bound.rotary_rows} rows for a context of {contexts.max()}"
        yield "rotary-rows", "cos_cache", got, "a row for every position that is rotated"


def _blocks(
    call: Call, table: Int64, past: Int64, lengths: Int64, num_blocks: int, block_size: int
) -> Iterator[Violation]:
    for b, column in np.argwhere((table < -1) | (table >= num_blocks)):
        got = f"block {table[b, column]} at ({b}, {column})"
        yield "block-range", "block_table", got, f"-1 or a block below {num_blocks}"
    for b in np.flatnonzero(lengths):
        window = call.local_window_size
        first = max(0, int(past[b]) - window + 1) if window > 0 else 0
        last = int(past[b] + lengths[b]) - 1
        live = table[b, first // block_size : last // block_size + 1]
        for column in np.flatnonzero(live < 0):
            got = f"no block at ({b}, {first // block_size + column})"
            yield "block-mapped", "block_table", got, f"a block for each of the positions {first} to {last}"


def _derived_slots(table: Int64, past: Int64, lengths: Int64, block_size: int) -> Int64:
    sequence = np.repeat(np.arange(len(past)), lengths)
    position = np.concatenate(
        [np.arange(start, start + count) for start, count in zip(past, lengths, strict=True)]
    )
    slots: Int64 = table[sequence, position // block_size] * block_size + position % block_size
    return slots


def _slots(subject: str, slots: Int64, capacity: int) -> Iterator[Violation]:
    for token in np.flatnonzero((slots < -1) | (slots >= capacity)):
        yield "slot-range", subject, f"slot {slots[token]} at token {token}", f"-1 or a slot below {capacity}"
    written, counts = np.unique(slots[slots >= 0], return_counts=True)
    for slot in written[counts > 1]:
        yield "slot-unique", subject, f"slot {slot} written by more than one token", "one token a slot"


def _storage(arrays: Mapping[str, Array]) -> Iterator[Violation]:
    for cache in arrays.keys() & {"key_cache", "value_cache"}:
        for name, array in arrays.items():
            if name != cache and np.shares_memory(array, arrays[cache]):
                yield "cache-overlap", name, f"memory shared with {cache}", "memory of its own"
    for name in ("k_scale", "v_scale"):
        if name in arrays:
            scale = arrays[name].astype(np.float32)
            if not (np.isfinite(scale) & (scale > 0)).all():
                yield "scale-positive", name, "a scale that is 0, negative or not finite", "scales above 0"


def _metadata(bounds: Int64, lengths: Int64, contexts: Int64) -> Iterator[Violation]:
    # The longest entries are upper bounds, the optional third is a lower one; 0 says nothing.
    measured = (("longest query", int(lengths.max())), ("longest context", int(contexts.max())))
    for bound, (what, actual) in zip(bounds[:2], measured, strict=True):
        if 0 < bound < actual:
            yield (
                "metadata-bound",
                "attention_metadata",
                f"{what} {actual} above the bound {bound}",
                "true bounds",
            )
    if len(bounds) == 3 and bounds[2] > measured[1][1]:
        got = f"longest context {measured[1][1]} below the lower bound {bounds[2]}"
        yield "metadata-bound", "attention_metadata", got, "true bounds"
