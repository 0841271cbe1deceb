"""Caches behind reserved addresses, for the tests on a GPU: LATENT rows with a model's bytes and strides.

qwen2.5-14b has 96 bindings (48 layers, keys and values) of 8 heads of 128 float16, 2,048 bytes a token. The
operator reads LATENT rows, so each binding is used as a cache of rows of 1,024: equal bytes, strides and
granules, another meaning of the channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from paged_cuda import Bounds, CudaVmmDriver, DeviceArray, PagedAttention, Stream
from paged_kv.vmm import (
    AdmissionRefused,
    BasePlacement,
    HandlePool,
    KvCacheGeometry,
    KvLayout,
    MemoryGovernor,
    Placement,
    VirtualArena,
    VmmDriver,
)
from paged_schema import Call, PagedAttentionAttributes, PagedAttentionInputs, check

BLOCK = 64
CAPACITY = 32_768


@dataclass(frozen=True)
class RowShape:
    """LATENT rows of one kind of cache."""

    head_size: int
    v_head_size: int
    heads: int
    kernel: str


WIDE = RowShape(1024, 512, 16, "baseline")
MLA = RowShape(576, 512, 16, "sm80")


def geometry_14b(layout: KvLayout = KvLayout.SEQ_MAJOR, capacity: int = CAPACITY) -> KvCacheGeometry:
    """All 96 bindings of qwen2.5-14b."""
    return KvCacheGeometry.uniform(layout, layers=48, kv_heads=8, head_dim=128, capacity=capacity)


def latent_call(shape: RowShape, *, slots: bool) -> Call:
    """The checked node over such rows in float16."""
    attributes = PagedAttentionAttributes(
        num_heads=shape.heads,
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=shape.v_head_size,
        scale=shape.head_size**-0.5,
    )
    inputs = PagedAttentionInputs(
        query=f"f16[t, {shape.heads * shape.head_size}]",
        key=f"f16[t, {shape.head_size}]",
        key_cache=f"f16[n, {BLOCK}, 1, {shape.head_size}]",
        cumulative_sequence_length="i32[b1]",
        past_seqlens="i32[b]",
        block_table="i32[b, m]",
        slot_mapping="i32[t]" if slots else None,
    )
    return check(attributes, inputs, ort="1.31")


def operator(
    shape: RowShape, stream: Stream, *, context: int = CAPACITY, slots: bool = False
) -> PagedAttention:
    """A prepared operator for one decoding sequence."""
    bounds = Bounds(max_batch=1, max_tokens=1, max_context=context)
    call = latent_call(shape, slots=slots)
    return PagedAttention(call, bounds, device=stream.device, kernel=shape.kernel).prepare()


class Sequence:
    """The arrays of one decoding sequence at fixed addresses; lengths change behind them.

    Its pages are the contiguous pages of its region, in order.
    """

    def __init__(
        self, shape: RowShape, bindings: int, stream: Stream, blocks: int = CAPACITY // BLOCK
    ) -> None:
        self.stream = stream
        rng = np.random.default_rng(8)

        def normal(*extents: int) -> DeviceArray:
            values = rng.standard_normal(extents, np.float32).astype(np.float16)
            return DeviceArray.from_numpy(values, stream, stream.device)

        self.query = normal(1, shape.heads * shape.head_size)
        self.key = normal(1, shape.head_size)
        self.table = DeviceArray.from_numpy(np.arange(blocks, dtype=np.int32)[None], stream, stream.device)
        self.starts = DeviceArray.from_numpy(np.array([0, 1], np.int32), stream, stream.device)
        self.past = DeviceArray.from_numpy(np.zeros(1, np.int32), stream, stream.device)
        width = shape.heads * shape.v_head_size
        self.outputs = [DeviceArray.empty((1, width), "float16", stream.device) for _ in range(bindings)]

    def set_length(self, tokens: int) -> None:
        """Let the next run append the last of `tokens` tokens."""
        write(self.past.pointer, np.array([tokens - 1], np.int32), self.stream)

    def run(self, op: PagedAttention, caches: list[DeviceArray]) -> None:
        """One step over every binding."""
        for cache, output in zip(caches, self.outputs, strict=True):
            op.run(
                query=self.query,
                key=self.key,
                key_cache=cache,
                cumulative_sequence_length=self.starts,
                past_seqlens=self.past,
                block_table=self.table,
                output=output,
                stream=self.stream,
            )

    def read(self) -> list[npt.NDArray[np.uint16]]:
        """The bits of all outputs, which are poisoned again."""
        found = [output.to_numpy(self.stream).view(np.uint16) for output in self.outputs]
        for output in self.outputs:
            with self.stream.device as device:
                device.driver.fill(output.pointer, 0xFF, output.nbytes, self.stream.handle)
        return found


def write(pointer: int, values: npt.NDArray[Any], stream: Stream) -> None:
    """Copy host values to an address and wait."""
    source = np.ascontiguousarray(values)
    with stream.device as device:
        device.driver.copy_to_device(pointer, source.ctypes.data, source.nbytes, stream.handle)
        device.driver.synchronize(stream.handle)


class Rows:
    """Random rows for every binding, cut from one block so that each binding's are others."""

    STEP = 7

    def __init__(self, shape: RowShape, bindings: int, tokens: int) -> None:
        extents = (tokens + bindings * self.STEP, shape.head_size)
        self._rows = np.random.default_rng(3).standard_normal(extents, np.float32).astype(np.float16)

    def of(self, binding: int, first: int, end: int) -> npt.NDArray[np.float16]:
        """Rows [first, end) of a binding."""
        start = binding * self.STEP
        return self._rows[start + first : start + end]


def make_pool(vmm: VmmDriver, limit: int = 64 << 30, **options: int) -> HandlePool:
    governor = MemoryGovernor(device=limit)
    holder = governor.register("cache")
    assert not isinstance(holder, AdmissionRefused)
    return HandlePool(vmm, governor, holder, **options)


def make_arena(
    vmm: VmmDriver,
    geometry: KvCacheGeometry,
    how: BasePlacement = BasePlacement.GRANULE_ALIGNED,
    **options: int,
) -> VirtualArena:
    pool = make_pool(vmm, **options)
    return VirtualArena(Placement.of(geometry, pool.granule, how), pool)


def commit(arena: VirtualArena, tokens: int, stream: Stream, bucket: int | None = None) -> int:
    """Commit, and return the bytes that were billed for it."""
    outcome = arena.commit(arena.planner.plan(arena.table, tokens, bucket), stream=stream.handle)
    assert not isinstance(outcome, AdmissionRefused)
    return outcome.billed_bytes


def free_bytes(vmm: CudaVmmDriver) -> int:
    """What the driver says is free."""
    return vmm.memory_info()[0]
