"""Reserved addresses on a GPU: what the driver counts, what survives a cycle, what a bad store does."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paged_cuda import CapturedGraph, CudaVmmDriver, Device, DeviceArray, DriverError, Stream
from paged_kv.errors import CaptureInProgress, WorkInFlight
from paged_kv.vmm import BasePlacement, KvCacheGeometry, KvLayout
from vmm_support import CAPACITY, commit, free_bytes, geometry_14b, make_arena, write

CYCLES = 10_000
SMALL: dict[str, Any] = {"layers": 24, "kv_heads": 2, "head_dim": 64, "capacity": 512}


@pytest.fixture
def vmm(device: Device) -> CudaVmmDriver:
    gc.collect()  # what earlier tests left is freed before anybody counts
    return CudaVmmDriver(device)


def test_the_driver_maps_what_the_planner_plans(vmm: CudaVmmDriver, stream: Stream, facts: Any) -> None:
    """Every committed byte shows in the driver's own count, none beside it."""
    minimum, recommended = vmm.granularity()
    facts["vmm granule, minimum and recommended"] = [minimum, recommended]
    cases = [
        ("14b head-major", geometry_14b(KvLayout.HEAD_MAJOR), BasePlacement.GRANULE_ALIGNED, (1, 8_192)),
        ("14b seq-major", geometry_14b(), BasePlacement.GRANULE_ALIGNED, (1, 1_024, 1_025, 4_000, 16_000)),
        (
            "14b token-major",
            geometry_14b(KvLayout.TOKEN_MAJOR),
            BasePlacement.GRANULE_ALIGNED,
            (1, 10, 4_096),
        ),
        (
            "0.5b aligned",
            KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, **SMALL),
            BasePlacement.GRANULE_ALIGNED,
            (64,),
        ),
        ("0.5b packed", KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, **SMALL), BasePlacement.PACKED, (64,)),
    ]
    seen: dict[str, list[list[int]]] = {}
    for name, geometry, how, lengths in cases:
        with make_arena(vmm, geometry, how) as arena:
            first = free_bytes(vmm)
            # The driver keeps page tables of its own once it has made them.
            commit(arena, lengths[-1], stream)
            stream.synchronize()
            arena.decommit(arena.planner.shrink_plan(arena.table, 0))
            empty = free_bytes(vmm)
            facts.setdefault("vmm: bytes the driver kept for itself", {})[name] = first - empty
            for tokens in lengths:
                plan = arena.planner.plan(arena.table, tokens)
                commit(arena, tokens, stream)
                taken = empty - free_bytes(vmm)
                seen.setdefault(name, []).append([tokens, plan.physical_bytes, taken, plan.attributed_bytes])
                assert taken == plan.physical_bytes == arena.mapped_bytes
            arena.check()
            stream.synchronize()
        assert free_bytes(vmm) == empty, name
    facts["vmm: tokens, planned, taken by the driver, attributed"] = seen
    heads, seqs = seen["14b head-major"][0][1], seen["14b seq-major"][0][1]
    assert heads == 8 * seqs
    assert seen["0.5b packed"][0][1] <= 8 << 20
    assert seen["0.5b aligned"][0][1] == 96 << 20


def test_new_memory_is_zero_and_old_memory_is_kept(vmm: CudaVmmDriver, stream: Stream) -> None:
    geometry = KvCacheGeometry.uniform(
        KvLayout.SEQ_MAJOR, layers=1, kv_heads=8, head_dim=128, capacity=CAPACITY
    )
    with make_arena(vmm, geometry) as arena:
        commit(arena, 1_024, stream)
        cache = vmm.array(arena.address_of(0), (CAPACITY, 1024), "float16")
        write(cache.pointer, np.full(1_024 * 1024, 3, np.float16), stream)
        commit(arena, 4_096, stream)
        grown = DeviceArray.from_pointer(cache.pointer, (4_096, 1024), "float16", stream.device).to_numpy(
            stream
        )
        assert (grown[:1_024] == 3).all()
        assert not grown[1_024:].any()


def test_a_copy_past_the_end_fails_and_hurts_nothing(vmm: CudaVmmDriver, stream: Stream) -> None:
    geometry = KvCacheGeometry.uniform(
        KvLayout.SEQ_MAJOR, layers=1, kv_heads=8, head_dim=128, capacity=CAPACITY
    )
    with make_arena(vmm, geometry) as arena:
        commit(arena, 1_024, stream)
        end = arena.address_of(0) + arena.placement.granularity
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            write(end - 1, np.ones(2, np.uint8), stream)
        write(end - 1, np.ones(1, np.uint8), stream)


def test_a_store_past_the_end_kills_its_process_alone(vmm: CudaVmmDriver, stream: Stream) -> None:
    """The operator writes a row where nothing is committed: its context is lost, ours is not."""
    child = [sys.executable, str(Path(__file__).with_name("vmm_fault_child.py"))]
    done = subprocess.run(child, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["first"] in ("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED")
    assert told["after"] == told["first"], "the error must stay"
    assert told["inside"] == "CUDA_SUCCESS", "a store inside the committed part must not fail"
    array = DeviceArray.from_numpy(np.arange(9, dtype=np.int32), stream, stream.device)
    np.testing.assert_array_equal(array.to_numpy(stream), np.arange(9))


@pytest.mark.parametrize("retain", [0, 4])
def test_ten_thousand_cycles_leave_free_memory_where_it_was(
    retain: int, vmm: CudaVmmDriver, stream: Stream, facts: Any
) -> None:
    geometry = KvCacheGeometry.uniform(
        KvLayout.SEQ_MAJOR, layers=1, kv_heads=8, head_dim=128, capacity=CAPACITY
    )
    with make_arena(vmm, geometry) as arena:
        commit(arena, 1_025, stream)
    outside = free_bytes(vmm)
    with make_arena(vmm, geometry, retain=retain) as arena:
        seen = set()
        for cycle in range(CYCLES // 2 if retain else CYCLES):
            commit(arena, 1 + 1_024 * (cycle % 2), stream)
            stream.synchronize()
            arena.decommit(arena.planner.shrink_plan(arena.table, 0))
            if cycle % 500 == 499:
                seen.add(free_bytes(vmm))
        arena.check()
        assert len(seen) == 1
        assert arena.mapped_bytes == 0
        arena.pool.trim()
    assert free_bytes(vmm) == outside
    facts[f"vmm: cycles of grow and shrink, {retain} handles kept"] = CYCLES // 2 if retain else CYCLES


def test_nothing_is_mapped_in_a_capture_nor_unmapped_under_a_replay(
    vmm: CudaVmmDriver, stream: Stream
) -> None:
    geometry = KvCacheGeometry.uniform(
        KvLayout.SEQ_MAJOR, layers=1, kv_heads=8, head_dim=128, capacity=CAPACITY
    )
    with make_arena(vmm, geometry) as arena:
        commit(arena, 1_024, stream)
        plan = arena.planner.plan(arena.table, 4_096)
        with CapturedGraph(stream) as graph:
            with arena.pool.gate.capture(), pytest.raises(CaptureInProgress):
                arena.commit(plan, stream=stream.handle)
            with pytest.raises(DriverError, match="capture"):
                vmm.create_handle(arena.placement.granularity)
            with stream.device as device:
                for _ in range(2_000):
                    device.driver.fill(arena.address_of(0), 0x11, arena.placement.granularity, stream.handle)
        graph.replay()
        arena.fence.record(stream.handle)
        shrink = arena.planner.shrink_plan(arena.table, 0)
        with pytest.raises(WorkInFlight):
            arena.decommit(shrink)
        stream.synchronize()
        assert arena.decommit(shrink).complete
        graph.close()


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_arena_memory_reaches_others_without_a_copy(vmm: CudaVmmDriver, stream: Stream, library: str) -> None:
    """Head-major strides: (blocks, 16, heads, 64) over stripes of the whole capacity."""
    other = pytest.importorskip(library)
    capacity = 16_384
    geometry = KvCacheGeometry.uniform(
        KvLayout.HEAD_MAJOR, layers=1, kv_heads=2, head_dim=64, capacity=capacity
    )
    with make_arena(vmm, geometry) as arena:
        commit(arena, capacity, stream)
        strides = (16 * 64, 64, capacity * 64, 1)
        cache = vmm.array(
            arena.address_of(1), (capacity // 16, 16, 2, 64), "float16", strides=strides, owner=arena
        )
        write(cache.pointer + 2 * (capacity * 64 + 17 * 64 + 3), np.array([7], np.float16), stream)
        if library == "torch":
            array, synchronize = other.from_dlpack(cache), other.cuda.synchronize
            assert array.data_ptr() == cache.pointer
            assert array.stride() == strides
        else:
            array, synchronize = other.asarray(cache), other.cuda.Device().synchronize
            assert array.data.ptr == cache.pointer
            assert array.strides == tuple(2 * stride for stride in strides)
        assert float(array[1, 1, 1, 3]) == 7
        array[2, 0, 0, 0] = 5
        synchronize()
        del array, synchronize
        row = DeviceArray.from_pointer(cache.pointer + 2 * 32 * 64, (1,), "float16", stream.device)
        assert row.to_numpy(stream)[0] == 5
