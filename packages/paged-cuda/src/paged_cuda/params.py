"""The one struct that every kernel of a step receives, filled in place before each launch.

Mirrors `kernels/layout/params.cuh`. A CPU test compiles the header with the offsets found here asserted.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from paged_cuda.errors import ArgumentMismatch

if TYPE_CHECKING:
    from paged_schema import Call

_POINTERS = (
    "query",
    "key",
    "key_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "slot_mapping",
    "cos_cache",
    "sin_cache",
    "output",
    "lse",
    "violations",
    "query_rotary",
    "items",
    "starts",
    "splits",
    "item_begin",
    "request_begin",
    "partial_output",
    "partial_facts",
    "progress",
)
_STRIDES = ("query_stride", "key_stride", "output_stride", "page_stride", "row_stride", "table_stride")
_INTEGERS = (
    "tokens",
    "batch",
    "max_blocks",
    "num_blocks",
    "block_shift",
    "num_heads",
    "head_size",
    "v_head_size",
    "rotary_dim",
    "rotary_offset",
    "rotary_rows",
    "rotary_interleaved",
    "query_first",
    "query_width",
    "local_window_size",
    "causal",
    "slices",
    "row_tiles",
    "row_tile",
    "kv_tile_shift",
    "min_tiles",
    "item_cost",
    "slow_tiles",
    "slow_cost",
    "chunk",
    "max_items",
    "max_parts",
    "combine_entries",
    "schedule_settled",
)
_FLOATS = ("scale", "softcap")


class AttentionParams(ctypes.Structure):
    """Arguments of all kernels: addresses, strides in elements, extents and frozen attributes."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        *((name, ctypes.c_float) for name in _FLOATS),
    )


FIELDS: tuple[str, ...] = (*_POINTERS, *_STRIDES, *_INTEGERS, *_FLOATS)


def frozen_params(call: Call) -> AttentionParams:
    """Return the struct with everything that `call` fixes.

    Raises:
        ArgumentMismatch: The call leaves a size open that the kernels need.
    """
    rotary_dim = call.rotary_dim if call.rotary else 0
    sizes = {"head_size": call.head_size, "v_head_size": call.v_head_size, "rotary_dim": rotary_dim}
    for name, size in sizes.items():
        if not size and (call.rotary or name != "rotary_dim"):
            raise ArgumentMismatch(
                "open-size", name, size, "a known size: give the inputs' last dimensions to check"
            )
    return AttentionParams(
        **sizes,
        num_heads=call.num_heads,
        rotary_offset=call.rotary_offset,
        rotary_interleaved=int(call.rotary_interleaved),
        local_window_size=call.local_window_size,
        causal=int(call.causal),
        scale=call.scale,
        softcap=call.softcap,
    )
