"""The arrays of one run, checked against the call before anything is launched.

Everything the host can see is checked here: presence, types, extents, strides, GPU. What only the device
can see (ids, slots, lengths) is masked or skipped by the kernels. An unchanged geometry is not checked
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paged_cuda.addresses import Reach, reach_of
from paged_cuda.arrays import DeviceArray, Geometry, Shape
from paged_cuda.bounds import Bounds
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.params import AttentionParams
from paged_cuda.views import UNKNOWN_DEVICE, device_view

if TYPE_CHECKING:
    from paged_schema import Call


class Operands(NamedTuple):
    """The arrays of one run; None where an optional one is absent."""

    query: DeviceArray
    key: DeviceArray
    key_cache: DeviceArray
    cumulative_sequence_length: DeviceArray
    past_seqlens: DeviceArray
    block_table: DeviceArray
    slot_mapping: DeviceArray | None
    cos_cache: DeviceArray | None
    sin_cache: DeviceArray | None
    output: DeviceArray
    key_cache_out: DeviceArray | None
    lse: DeviceArray | None


StepGeometry = tuple[Geometry | None, ...]
_OPTIONAL = frozenset(("slot_mapping", "cos_cache", "sin_cache", "key_cache_out", "lse"))


def operands_of(arrays: Sequence[object]) -> Operands:
    """Return plain views of what a caller handed in, in the order of `Operands`.

    Raises:
        ArgumentMismatch: One is no array on a GPU, or one that is needed is missing.
    """
    return Operands._make(
        None if array is None and name in _OPTIONAL else device_view(array, name)
        for name, array in zip(Operands._fields, arrays, strict=True)
    )


def geometry_of(operands: Operands) -> StepGeometry:
    """Return all that `OperandCheck.admit` looks at, to be compared with an earlier run's."""
    return tuple([None if array is None else array.geometry for array in operands])


@dataclass(frozen=True, slots=True)
class OperandCheck:
    """What every run of one operator must satisfy.

    Attributes:
        call: The checked node.
        bounds: The largest batch.
        ordinal: The GPU's number.
    """

    call: Call
    bounds: Bounds
    ordinal: int

    def admit(self, operands: Operands, params: AttentionParams, *, padded: bool) -> Reach:
        """Check the geometry, write extents and strides into `params` and return what each array spans.

        Args:
            operands: The arrays.
            params: Written only when everything fits.
            padded: The index tensors are a `DeviceIndexPlan`, wider than the batch they hold.

        Raises:
            ArgumentMismatch: An array does not fit the call, the bounds or the other arrays.
        """
        call = self.call
        head_size, v_head_size = call.head_size or 0, call.v_head_size or 0
        self._check_kinds(operands)
        tokens = self._extent("tokens", operands.query.shape[0], call.tokens, self.bounds.max_tokens)
        batch_limit = self.bounds.max_batch
        batch = self._extent(
            "batch", operands.past_seqlens.shape[0], None if padded else call.batch, batch_limit
        )
        blocks, block_size = self._check_cache(operands.key_cache, head_size)
        columns = self._extent(
            "block_table columns", operands.block_table.shape[1], None if padded else call.max_blocks
        )
        _shape("query", operands.query, (tokens, call.num_heads * head_size))
        _shape("key", operands.key, (tokens, head_size))
        _shape("output", operands.output, (tokens, call.num_heads * v_head_size))
        _shape("cumulative_sequence_length", operands.cumulative_sequence_length, (batch + 1,))
        _shape("block_table", operands.block_table, (batch, columns))
        if operands.slot_mapping is not None and not padded:
            _shape("slot_mapping", operands.slot_mapping, (tokens,))
        if operands.lse is not None:
            _shape("lse", operands.lse, (tokens, call.num_heads))
        rotary_rows = self._check_rotary(operands)
        self._check_strides(operands)

        params.query_stride, params.key_stride = operands.query.strides[0], operands.key.strides[0]
        params.output_stride = operands.output.strides[0]
        params.page_stride, params.row_stride = operands.key_cache.strides[0], operands.key_cache.strides[1]
        params.table_stride = operands.block_table.strides[0]
        params.tokens, params.batch, params.max_blocks, params.num_blocks = tokens, batch, columns, blocks
        params.block_shift = block_size.bit_length() - 1
        params.rotary_rows = rotary_rows
        return reach_of(operands)

    def _check_kinds(self, operands: Operands) -> None:
        dtype = self.call.dtype
        kinds = {
            "query": (dtype, 2),
            "key": (dtype, 2),
            "key_cache": (dtype, 4),
            "cumulative_sequence_length": ("int32", 1),
            "past_seqlens": ("int32", 1),
            "block_table": ("int32", 2),
            "slot_mapping": ("int32", 1),
            "cos_cache": (dtype, 2),
            "sin_cache": (dtype, 2),
            "output": (dtype, 2),
            "key_cache_out": (dtype, 4),
            "lse": ("float32", 2),
        }
        for name, array in operands._asdict().items():
            if array is None:
                continue
            wanted, rank = kinds[name]
            if array.dtype != wanted:
                raise ArgumentMismatch("dtype", name, array.dtype, wanted)
            if len(array.shape) != rank:
                raise ArgumentMismatch("rank", name, f"shape {array.shape}", f"{rank} dimensions")
            if array.ordinal not in (self.ordinal, UNKNOWN_DEVICE):
                raise ArgumentMismatch(
                    "device", name, f"GPU {array.ordinal}", f"GPU {self.ordinal}, the operator's"
                )

    def _extent(self, name: str, got: int, declared: object, limit: int = 2**31 - 1) -> int:
        if isinstance(declared, int) and got != declared:
            raise ArgumentMismatch("extent", name, got, f"{declared}, as the call was checked with")
        if got > limit:
            raise ArgumentMismatch("bounds", name, got, f"at most {limit}, the operator's bound")
        return got

    def _check_cache(self, cache: DeviceArray, head_size: int) -> tuple[int, int]:
        blocks, block_size, heads, width = cache.shape
        self._extent("num_blocks", blocks, self.call.num_blocks)
        self._extent("block_size", block_size, self.call.block_size)
        if block_size < 16 or block_size & (block_size - 1):
            raise ArgumentMismatch("block_size", "key_cache", block_size, "a power of two, 16 or more")
        if (heads, width) != (1, head_size):
            raise ArgumentMismatch("shape", "key_cache", cache.shape, f"(blocks, block_size, 1, {head_size})")
        return blocks, block_size

    def _check_rotary(self, operands: Operands) -> int:
        cos, sin, call = operands.cos_cache, operands.sin_cache, self.call
        if not call.rotary:
            return 0
        if cos is None or sin is None:
            absent = "cos_cache" if cos is None else "sin_cache"
            raise ArgumentMismatch("presence", absent, "nothing", "the table that the call's rotary needs")
        rows = self._extent("rotary_rows", cos.shape[0], call.rotary_rows)
        for name, table in (("cos_cache", cos), ("sin_cache", sin)):
            _shape(name, table, (rows, (call.rotary_dim or 0) // 2))
            _dense(name, table)
        return rows

    def _check_strides(self, operands: Operands) -> None:
        for name in ("query", "key", "output", "key_cache"):
            array = getattr(operands, name)
            _last_dense(name, array)
            if not _distinct(array):
                raise ArgumentMismatch("strides", name, array.strides, "rows that do not overlap")
            if name != "output" and any(
                s % 8 for n, s in zip(array.shape[:-1], array.strides, strict=False) if n > 1
            ):
                raise ArgumentMismatch("strides", name, array.strides, "multiples of 8 elements (16 bytes)")
        _last_dense("block_table", operands.block_table)
        for name in ("cumulative_sequence_length", "past_seqlens", "slot_mapping", "lse"):
            array = getattr(operands, name)
            if array is not None:
                _dense(name, array)


def _shape(name: str, array: DeviceArray, wanted: Shape) -> None:
    if array.shape != wanted:
        raise ArgumentMismatch("shape", name, array.shape, f"{wanted}")


def _last_dense(name: str, array: DeviceArray) -> None:
    if array.shape[-1] > 1 and array.strides[-1] != 1:
        raise ArgumentMismatch("strides", name, array.strides, "contiguous elements in the last dimension")


def _dense(name: str, array: DeviceArray) -> None:
    step = 1
    for extent, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if extent > 1 and stride != step:
            raise ArgumentMismatch("strides", name, array.strides, "a contiguous array")
        step *= max(extent, 1)


def _distinct(array: DeviceArray) -> bool:
    """Return whether no two elements share an address, for positive nested strides."""
    reach = 1
    for stride, extent in sorted((s, n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * extent
    return True
