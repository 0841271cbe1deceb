"""The five int32 tensors of a step at fixed device addresses, filled by one pinned copy.

Rows beyond the plan's own are empty sequences, unmapped pages and skipped slots, so a graph captured over
the whole extent replays for every smaller batch.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paged_cuda.arrays import DeviceArray, contiguous_strides
from paged_cuda.bounds import Bounds
from paged_cuda.device import Device, DeviceLike, DeviceMemory, resolve_device
from paged_cuda.errors import ArgumentMismatch, DriverError
from paged_cuda.stream import StreamLike, stream_handle

Int32 = npt.NDArray[np.int32]
_ALIGNMENT = 64  # elements: 256 bytes


class IndexPlan(Protocol):
    """What `upload` reads of a host plan; `paged_kv.PagedIndexPlan` is one."""

    @property
    def block_table(self) -> Int32:
        """(batch, blocks) int32."""
        ...

    @property
    def slot_mapping(self) -> Int32:
        """(tokens,) int32."""
        ...

    @property
    def cumulative_sequence_length(self) -> Int32:
        """(batch + 1,) int32."""
        ...

    @property
    def past_seqlens(self) -> Int32:
        """(batch,) int32."""
        ...


class IndexArrays(NamedTuple):
    """The tensors on the device, at the largest extents."""

    cumulative_sequence_length: DeviceArray
    past_seqlens: DeviceArray
    slot_mapping: DeviceArray
    block_table: DeviceArray


class DeviceIndexPlan:
    """Fixed device tensors for every plan inside `bounds`.

    Attributes:
        bounds: The largest plan.
        block_size: Tokens a block.
        columns: Width of the block table.
        arrays: The device tensors.

    Raises:
        ArgumentMismatch: A block size or a width that is none.
    """

    def __init__(
        self, bounds: Bounds, block_size: int, *, columns: int | None = None, device: DeviceLike = None
    ) -> None:
        for name, got, least in (("block_size", block_size, 1), ("columns", columns, 0)):
            if got is not None and (type(got) is not int or got < least):
                raise ArgumentMismatch(name, name, repr(got), f"an integer, at least {least}")
        self.bounds = bounds
        self.block_size = block_size
        self.columns = bounds.max_blocks(block_size) if columns is None else columns
        shapes = {
            "cumulative_sequence_length": (bounds.max_batch + 1,),
            "past_seqlens": (bounds.max_batch,),
            "slot_mapping": (bounds.max_tokens,),
            "block_table": (bounds.max_batch, self.columns),
        }
        self._device = resolve_device(device)
        self._offsets, size = {}, 0
        for name, shape in shapes.items():
            self._offsets[name] = size
            size += -(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
        self._memory = DeviceMemory(self._device, 4 * size)
        self.arrays = IndexArrays(**{name: self._array(name, shape) for name, shape in shapes.items()})
        self._staging = [_Staging(self._device, size) for _ in range(2)]
        self._turn = 0

    def _array(self, name: str, shape: tuple[int, ...]) -> DeviceArray:
        pointer = self._memory.pointer + 4 * self._offsets[name]
        strides = contiguous_strides(shape)
        return DeviceArray(pointer, shape, strides, "int32", self._device.ordinal, self._memory)

    def upload(self, plan: IndexPlan, stream: StreamLike) -> None:
        """Queue one copy of `plan` in `stream`, outside any capture.

        Only the rows in use are copied. The plan's arrays may be changed as soon as this returns.

        Raises:
            ArgumentMismatch: The plan is malformed or exceeds the bounds, or the stream is under capture; the
                device keeps the previous plan.
        """
        _check(plan, self.bounds, self.columns)
        handle, staging = stream_handle(stream), self._staging[self._turn]
        with self._device:
            if self._device.driver.is_capturing(handle):
                advice = "an upload before the replay: a captured copy would bring back old staging memory"
                raise ArgumentMismatch("capture", "stream", "a stream under capture", advice)
            self._turn = 1 - self._turn
            staging.wait()
            used = self._fill(staging.values, plan)
            self._device.driver.copy_to_device(self._memory.pointer, staging.address, 4 * used, handle)
            staging.record(handle)

    def _fill(self, values: Int32, plan: IndexPlan) -> int:
        """Write the plan over the staging buffer and return the elements in use."""
        batch, tokens = len(plan.past_seqlens), len(plan.slot_mapping)
        start, past, slots, table = self._offsets.values()
        values[start : start + batch + 1] = plan.cumulative_sequence_length
        values[start + batch + 1 : past] = plan.cumulative_sequence_length[-1]
        values[past : past + batch] = plan.past_seqlens
        values[past + batch : slots] = 0
        values[slots : slots + tokens] = plan.slot_mapping
        values[slots + tokens : table] = -1
        rows = values[table : table + batch * self.columns].reshape(batch, self.columns)
        width = plan.block_table.shape[1]
        rows[:, :width] = plan.block_table
        rows[:, width:] = -1
        return table + batch * self.columns


@dataclass(slots=True, weakref_slot=True)
class _Staging:
    """Pinned memory that is written again only after its last copy is done."""

    device: Device
    size: int

    address: int = 0
    values: Int32 = None  # type: ignore[assignment]
    event: int = 0
    pending: bool = False

    def __post_init__(self) -> None:
        with self.device:
            self.address = self.device.driver.allocate_pinned(4 * self.size)
            self.event = self.device.driver.create_event()
        self.values = np.ctypeslib.as_array((ctypes.c_int32 * self.size).from_address(self.address))
        weakref.finalize(self, _release, self.device, self.address, self.event)

    def wait(self) -> None:
        if self.pending:
            self.device.driver.wait_event(self.event)

    def record(self, stream: int) -> None:
        self.device.driver.record_event(self.event, stream)
        self.pending = True


def _release(device: Device, address: int, event: int) -> None:
    try:
        with device:
            device.driver.destroy_event(event)
            device.driver.free_pinned(address)
    except DriverError:
        return


def _check(plan: IndexPlan, bounds: Bounds, columns: int) -> None:
    batch, tokens = len(plan.past_seqlens), len(plan.slot_mapping)
    for name in ("block_table", "slot_mapping", "cumulative_sequence_length", "past_seqlens"):
        array = getattr(plan, name)
        if array.dtype != np.int32:
            raise ArgumentMismatch("dtype", name, array.dtype, "int32")
    starts = plan.cumulative_sequence_length
    shape = plan.block_table.shape
    if len(starts) != batch + 1:
        raise ArgumentMismatch(
            "shape", "cumulative_sequence_length", len(starts), f"batch + 1 = {batch + 1} elements"
        )
    if len(shape) != 2 or shape[0] != batch:
        raise ArgumentMismatch("shape", "block_table", shape, f"({batch}, blocks)")
    for name, got, limit in (
        ("max_batch", batch, bounds.max_batch),
        ("max_tokens", tokens, bounds.max_tokens),
        ("block_table columns", shape[1], columns),
    ):
        if got > limit:
            raise ArgumentMismatch("bounds", name, got, f"at most {limit}; raise the bounds")
    lengths = np.diff(starts)
    if starts[0] != 0 or starts[-1] > tokens or (lengths < 0).any():
        wanted = f"a rise from 0 to at most the {tokens} tokens of slot_mapping"
        raise ArgumentMismatch("cumulative", "cumulative_sequence_length", starts.tolist(), wanted)
    if batch and (plan.past_seqlens < 0).any():
        raise ArgumentMismatch("past", "past_seqlens", int(plan.past_seqlens.min()), "no negative length")
    longest = int((plan.past_seqlens.astype(np.int64) + lengths).max(initial=0))
    if longest > bounds.max_context:
        raise ArgumentMismatch(
            "bounds", "max_context", longest, f"at most {bounds.max_context}; raise the bound"
        )
