"""A pool of pages that grows and shrinks in place under one graph, owned by the page authority."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_cuda import (
    Bounds,
    CapturedGraph,
    CudaVmmDriver,
    DeviceArray,
    DeviceIndexPlan,
    PagedAttention,
    Stream,
)
from paged_kv import KVCacheManager, PageGeometry, PoolShrinkRefused
from paged_kv.errors import WorkInFlight
from paged_kv.vmm import MappedStorage, PagedPool, PoolResized, paged_cache_geometry
from vmm_support import BLOCK, MLA, free_bytes, latent_call, make_pool

LAYERS = 4
PAGES = PageGeometry(2_048, BLOCK)
BATCH = 3
# Lengths before a step of one token each; each row is one step of the three sequences.
ROUNDS = (
    (64, [100, 7, 0]),
    (256, [4_000, 130, 64]),
    (1_024, [16_000, 20_000, 9_000]),
)


def operator(stream: Stream) -> PagedAttention:
    bounds = Bounds(max_batch=BATCH, max_tokens=BATCH, max_context=PAGES.num_blocks * BLOCK)
    return PagedAttention(latent_call(MLA, slots=True), bounds, device=stream.device, kernel="sm80").prepare()


class Step:
    """The arrays of one captured step at their largest extents."""

    def __init__(self, op: PagedAttention, stream: Stream) -> None:
        self.op, self.stream = op, stream
        rng = np.random.default_rng(1)
        self.plan = DeviceIndexPlan(op.bounds, BLOCK, device=stream.device)
        query = rng.standard_normal((BATCH, MLA.heads * MLA.head_size), np.float32).astype(np.float16)
        self.key = rng.standard_normal((BATCH, MLA.head_size), np.float32).astype(np.float16)
        self.query = DeviceArray.from_numpy(query, stream, stream.device)
        self.keys = DeviceArray.from_numpy(self.key, stream, stream.device)
        shape = (BATCH, MLA.heads * MLA.v_head_size)
        self.outputs = [DeviceArray.empty(shape, "float16", stream.device) for _ in range(LAYERS)]

    def run(self, caches: list[DeviceArray]) -> None:
        for cache, output in zip(caches, self.outputs, strict=True):
            self.op.run(
                query=self.query,
                key=self.keys,
                key_cache=cache,
                plan=self.plan,
                output=output,
                stream=self.stream,
            )

    def read(self) -> list[np.ndarray]:
        return [output.to_numpy(self.stream).view(np.uint16) for output in self.outputs]


def test_a_pool_of_pages_grows_and_shrinks_under_one_graph(stream: Stream, facts: Any) -> None:
    vmm = CudaVmmDriver(stream.device)
    pool = make_pool(vmm)
    kv = KVCacheManager(PAGES, max_sequences=8, max_blocks_per_sequence=PAGES.num_blocks, initial_blocks=1)
    storage = MappedStorage(
        paged_cache_geometry(PAGES, layers=LAYERS, kv_heads=1, head_dim=MLA.head_size, tensors=1), pool
    )
    paged = PagedPool(kv, storage)
    extents = (PAGES.num_blocks, BLOCK, 1, MLA.head_size)
    caches = [vmm.array(storage.address_of(layer), extents, "float16") for layer in range(LAYERS)]
    op = operator(stream)
    step, graph, captures = Step(op, stream), None, 0
    mapped = []
    for blocks, lengths in ROUNDS:
        before = free_bytes(vmm)
        grown = paged.grow(blocks, stream=stream.handle)
        assert isinstance(grown, PoolResized)
        assert before - free_bytes(vmm) == grown.memory.billed_bytes
        assert (
            storage.physical_bytes
            == LAYERS * -(-blocks * BLOCK * MLA.head_size * 2 // pool.granule) * pool.granule
        )
        mapped.append(storage.physical_bytes)
        rows = kv.create(BATCH)
        prefill(kv, rows, lengths, caches, stream)
        transaction = kv.begin_step(rows, [1] * BATCH)
        with transaction:
            plan = transaction.plan()
            assert plan.block_table.max() < blocks
            step.plan.upload(plan, stream)
            if graph is None:
                step.run(caches)
                with CapturedGraph(stream) as graph:
                    step.run(caches)
                captures += 1
            fresh = [copy_of(cache, blocks, stream) for cache in caches]
            graph.replay()
            storage.arena.fence.record(stream.handle)
            got = step.read()
            step.run(fresh)
            want = step.read()
            transaction.commit()
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
        assert len({output.tobytes() for output in got}) == LAYERS
        kv.complete(transaction.epoch)
        kv.release(rows)
    refused_then_shrunk(kv, paged, stream)
    assert captures == 1
    assert graph is not None
    stream.synchronize()
    graph.close()
    before, held = free_bytes(vmm), storage.physical_bytes
    paged.close()
    pool.close()
    assert free_bytes(vmm) == before + held
    facts["vmm: a pool of pages under one graph, pages and bytes"] = [
        [blocks, nbytes] for (blocks, _), nbytes in zip(ROUNDS, mapped, strict=True)
    ]


def refused_then_shrunk(kv: KVCacheManager, paged: PagedPool, stream: Stream) -> None:
    """A page in use stands in the way of shrinking; free pages do not; work in flight does."""
    rows = kv.admit([BLOCK * 600])
    with kv.begin_step(rows, [BLOCK * 600]) as transaction:
        transaction.commit()
    kv.complete(transaction.epoch)
    assert isinstance(paged.shrink(64), PoolShrinkRefused)
    kv.release(rows)
    # Launched as one graph, so that the host is back long before the work is done.
    with CapturedGraph(stream) as busy, stream.device as device:
        for _ in range(2_000):
            device.driver.fill(paged.storage.address_of(0), 0, 16 << 20, stream.handle)
    busy.replay()
    paged.storage.arena.fence.record(stream.handle)
    with pytest.raises(WorkInFlight):
        paged.shrink(64)
    stream.synchronize()
    busy.close()
    shrunk = paged.shrink(64)
    assert isinstance(shrunk, PoolResized)
    assert (shrunk.new, kv.pool_blocks) == (64, 64)
    kv.check("full")


def prefill(
    kv: KVCacheManager, rows: np.ndarray, lengths: list[int], caches: list[DeviceArray], stream: Stream
) -> None:
    """Give each sequence its pages and write random rows into them, layer by layer."""
    used = [index for index, length in enumerate(lengths) if length]
    with kv.begin_step(rows[used], [lengths[index] for index in used]) as transaction:
        slots = transaction.plan().slot_mapping.copy()
        transaction.commit()
    kv.complete(transaction.epoch)
    pages = np.unique(slots // BLOCK)
    rng = np.random.default_rng(len(slots))
    block = rng.standard_normal((BLOCK * 3 + LAYERS, MLA.head_size), np.float32).astype(np.float16)
    page_bytes = BLOCK * MLA.head_size * 2
    with stream.device as device:
        for layer, cache in enumerate(caches):
            for page in pages.tolist():
                start = layer + page % (2 * BLOCK)
                source = np.ascontiguousarray(block[start : start + BLOCK])
                device.driver.copy_to_device(
                    cache.pointer + page * page_bytes, source.ctypes.data, page_bytes, stream.handle
                )
                device.driver.synchronize(stream.handle)


def copy_of(cache: DeviceArray, blocks: int, stream: Stream) -> DeviceArray:
    """The first pages in ordinary memory; the ids are the same, so the tables are too."""
    fresh = DeviceArray.empty((blocks, *cache.shape[1:]), cache.dtype, stream.device)
    with stream.device as device:
        device.driver.copy_on_device(fresh.pointer, cache.pointer, fresh.nbytes, stream.handle)
    return fresh
