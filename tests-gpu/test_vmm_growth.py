"""A cache that grows across granules under one captured graph: same addresses, same graph, same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_cuda import CapturedGraph, CudaVmmDriver, DeviceArray, PagedAttention, Stream
from paged_kv.vmm import KvCacheGeometry, KvLayout
from vmm_support import (
    BLOCK,
    CAPACITY,
    MLA,
    WIDE,
    Rows,
    RowShape,
    Sequence,
    commit,
    free_bytes,
    geometry_14b,
    make_arena,
    operator,
    write,
)

STAGES = (100, 4_000, 16_000)


def mla_geometry() -> KvCacheGeometry:
    """Latent rows of 576, one binding a layer: 8 layers of 32,768 tokens, each 18 granules."""
    return KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, layers=4, kv_heads=1, head_dim=576, capacity=CAPACITY)


@pytest.mark.parametrize("name", ["14b", "latent"])
def test_one_graph_from_100_to_16000_tokens(name: str, stream: Stream, facts: Any) -> None:
    """100, 4,000 and 16,000 tokens; the bits are those of an eager run over a fresh allocation."""
    shape, geometry = (WIDE, geometry_14b()) if name == "14b" else (MLA, mla_geometry())
    bindings = len(geometry.bindings)
    vmm = CudaVmmDriver(stream.device)
    op, sequence = operator(shape, stream), Sequence(shape, bindings, stream)
    rows = Rows(shape, bindings, STAGES[-1])
    with make_arena(vmm, geometry) as arena:
        extents = (CAPACITY // BLOCK, BLOCK, 1, shape.head_size)
        addresses = [arena.address_of(binding) for binding in range(bindings)]
        caches = [vmm.array(address, extents, "float16", owner=arena) for address in addresses]
        graph, written, taken, last = None, 0, 0, []
        for tokens in STAGES:
            free = free_bytes(vmm)
            commit(arena, tokens, stream)
            taken += free - free_bytes(vmm)
            assert taken == arena.mapped_bytes
            stream.synchronize()
            for binding, address in enumerate(addresses):
                place = address + written * shape.head_size * 2
                write(place, rows.of(binding, written, tokens - 1), stream)
            written = tokens - 1
            sequence.set_length(tokens)
            if graph is None:
                sequence.run(op, caches)
                with CapturedGraph(stream) as graph:
                    sequence.run(op, caches)
                sequence.read()
            graph.replay()
            replayed = sequence.read()
            eager = fresh_run(op, sequence, shape, rows, tokens, stream)
            for got, want in zip(replayed, eager, strict=True):
                np.testing.assert_array_equal(got, want)
            assert len({array.tobytes() for array in replayed}) == bindings
            assert [arena.address_of(binding) for binding in range(bindings)] == addresses
            per_binding = arena.mapped_bytes // arena.placement.granularity // bindings
            last.append(per_binding)
        assert graph is not None
        stream.synchronize()
        graph.close()
        arena.check()
    if name == "14b":
        assert last == [1, 4, 16]  # the last granule in use is 0, 3, 15
    facts[f"vmm growth under one graph, {name}: granules a binding at {STAGES}"] = last


def fresh_run(
    op: PagedAttention, sequence: Sequence, shape: RowShape, rows: Rows, tokens: int, stream: Stream
) -> list[np.ndarray]:
    """The same step over ordinary memory, launched eagerly."""
    blocks = -(-tokens // BLOCK)
    caches = []
    for binding in range(len(sequence.outputs)):
        host = np.zeros((blocks * BLOCK, shape.head_size), np.float16)
        host[: tokens - 1] = rows.of(binding, 0, tokens - 1)
        array = host.reshape(blocks, BLOCK, 1, shape.head_size)
        caches.append(DeviceArray.from_numpy(array, stream, stream.device))
    sequence.run(op, caches)
    return sequence.read()


def test_replays_go_on_while_memory_is_committed_ahead(stream: Stream) -> None:
    """Growth on one stream, replays on another: the replays' bits do not change."""
    geometry = KvCacheGeometry.uniform(
        KvLayout.SEQ_MAJOR, layers=4, kv_heads=1, head_dim=576, capacity=CAPACITY
    )
    bindings = len(geometry.bindings)
    vmm, side = CudaVmmDriver(stream.device), Stream(stream.device)
    op, sequence = operator(MLA, stream), Sequence(MLA, bindings, stream)
    rows = Rows(MLA, bindings, 2_048)
    with make_arena(vmm, geometry) as arena:
        commit(arena, 1_024, stream)
        extents = (CAPACITY // BLOCK, BLOCK, 1, MLA.head_size)
        caches = [vmm.array(arena.address_of(b), extents, "float16") for b in range(bindings)]
        for binding, cache in enumerate(caches):
            write(cache.pointer, rows.of(binding, 0, 1_000), stream)
        sequence.set_length(1_001)
        sequence.run(op, caches)
        with CapturedGraph(stream) as graph:
            sequence.run(op, caches)
        graph.replay()
        want = sequence.read()
        for tokens in range(2_048, CAPACITY, 2_048):
            for _ in range(20):
                graph.replay()
            commit(arena, tokens, side)
            got = sequence.read()
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)
            graph.replay()
        stream.synchronize()
        side.synchronize()
        graph.close()
