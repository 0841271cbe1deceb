"""What committing memory behind a growing cache costs on this GPU, with and without handles made ahead.

Run as `python tests-gpu/measure_vmm.py OUT.json`. Times are of the host's clock around the call, and around
the call and the end of the zeroing that it queues: a step that waits for its cache waits for the second.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from paged_bench.record import (
    Case,
    Environment,
    Gpu,
    Memory,
    Record,
    Samples,
    Suite,
    capture,
    finish,
    package_digest,
    save,
)
from paged_bench.residency.cuda_probe import CudaProbe
from paged_bench.residency.reader import Access, Rows
from paged_bench.residency.shapes import SHAPES, KvShape
from paged_cuda import CudaVmmDriver, Stream
from paged_cuda._nvrtc import nvrtc_version
from paged_kv.vmm import (
    BasePlacement,
    CommitAhead,
    GranuleTable,
    KvCacheGeometry,
    KvGrowthController,
    KvLayout,
    MappedStorage,
    ReallocStorage,
    VirtualArena,
)
from vmm_support import commit, geometry_14b, make_arena, make_pool

BLOCKS = 3
Timer = Callable[[], float]


class Bench:
    """Collects the cases of one GPU."""

    def __init__(self) -> None:
        self.stream = Stream(0)
        self.vmm = CudaVmmDriver(self.stream.device)
        self.granule = self.vmm.granularity()[1]
        self.cases: list[Case] = []

    def add(
        self,
        name: str,
        title: str,
        group: str,
        series: dict[str, list[float]],
        *,
        calls: int = 1,
        memory: Memory | None = None,
        **parameters: int | str,
    ) -> None:
        """Add a case; every series holds BLOCKS blocks of equally many values in microseconds."""
        samples = tuple(
            Samples(
                what=what,
                timing="wall",
                values=tuple(values),
                blocks=(len(values) // BLOCKS,) * BLOCKS,
                calls=calls,
            )
            for what, values in series.items()
        )
        for one in samples:
            print(f"{name:44} {one.what:18} {one.median:12.1f} us", flush=True)
        self.cases.append(
            Case(
                id=f"vmm/{name}",
                title=title,
                group=group,
                parameters=dict(parameters),
                series=samples,
                memory=memory,
            )
        )


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Append the microseconds of the block."""
    begin = time.perf_counter_ns()
    yield
    into.append((time.perf_counter_ns() - begin) / 1e3)


def driver_calls(bench: Bench, count: int = 96) -> None:
    """Every call alone, on single granules, and one access call over all of them."""
    vmm, size, stream = bench.vmm, bench.granule, bench.stream
    names = ("create", "map", "set-access", "set-access-run", "zero", "unmap", "release")
    series: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(BLOCKS):
        address = vmm.reserve_addresses(count * size, size)
        places = [address + index * size for index in range(count)]
        handles = []
        for _ in range(count):
            with timed(series["create"]):
                handles.append(vmm.create_handle(size))
        for place, handle in zip(places, handles, strict=True):
            with timed(series["map"]):
                vmm.map_handle(place, size, handle)
        for place in places:
            with timed(series["set-access"]):
                vmm.set_access(place, size)
        for place in places:
            with timed(series["zero"]):
                vmm.fill(place, 0, size, stream.handle)
                stream.synchronize()
        for place in places:
            with timed(series["unmap"]):
                vmm.unmap(place, size)
        for _ in range(10):  # access is set anew on what was just mapped, as a growth does it
            for place, handle in zip(places, handles, strict=True):
                vmm.map_handle(place, size, handle)
            with timed(series["set-access-run"]):
                vmm.set_access(address, count * size)
            for place in places:
                vmm.unmap(place, size)
        for handle in handles:
            with timed(series["release"]):
                vmm.release_handle(handle)
        vmm.free_addresses(address, count * size)
    for name, values in series.items():
        granules = count if name == "set-access-run" else 1
        title = f"{name.replace('-', ' ')}: {granules} granule{'s'[: granules > 1]} of {size >> 20} MiB"
        bench.add(f"call/{name}", title, "driver calls", {"call": values}, granules=granules)


def growth(bench: Bench, name: str, geometry: KvCacheGeometry, before: int, after: int, samples: int) -> None:
    """One growth on the step path: handles created in it, and handles that waited."""
    for pooled in (False, True):
        calls: list[float] = []
        waits: list[float] = []
        granules = 0
        for _ in range(BLOCKS * samples):
            with make_arena(bench.vmm, geometry) as arena:
                if before:
                    commit(arena, before, bench.stream)
                granules = len(arena.planner.plan(arena.table, after).newly_mapped)
                if pooled:
                    arena.pool.prefill(granules)
                bench.stream.synchronize()
                with timed(waits):
                    with timed(calls):
                        commit(arena, after, bench.stream)
                    bench.stream.synchronize()
            arena.pool.trim()
        how = "handles waiting" if pooled else "handles created in it"
        bench.add(
            f"growth/{name}/{'pool' if pooled else 'cold'}",
            f"{before:,} to {after:,} tokens, {granules:,} granules, {how}",
            "stall of a growth",
            {"call": calls, "call+zeroed": waits},
            granules=granules,
            before=before,
            after=after,
        )


def ahead(bench: Bench, geometry: KvCacheGeometry, before: int, after: int, samples: int) -> None:
    """The same growth when the memory was committed ahead, and steps that do not grow."""
    calls: list[float] = []
    waits: list[float] = []
    ahead_calls: list[float] = []
    still: list[float] = []
    for _ in range(BLOCKS * samples):
        pool = make_pool(bench.vmm)
        storage = MappedStorage(geometry, pool)
        controller = KvGrowthController(storage, hard_max=geometry.capacity, min_bucket=before)
        controller.ensure(before, stream=bench.stream.handle)
        bench.stream.synchronize()
        with timed(ahead_calls):
            controller.commit_ahead(after, stream=bench.stream.handle)
        bench.stream.synchronize()
        with timed(waits):
            with timed(calls):
                controller.ensure(after, stream=bench.stream.handle)
            bench.stream.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(1_000):
            controller.ensure(after, stream=bench.stream.handle)
        still.append((time.perf_counter_ns() - begin) / 1e6)
        storage.close()
        pool.close()
    group = "stall of a growth"
    bench.add(
        "growth/14b/committed-ahead",
        f"{before:,} to {after:,} tokens, memory committed ahead: what is left in the step",
        group,
        {"call": calls, "call+zeroed": waits},
    )
    bench.add("growth/14b/ahead-itself", "the commit ahead, off the step path", group, {"call": ahead_calls})
    bench.add("growth/none", "a step that does not grow", group, {"call": still}, calls=1_000)


def steps(bench: Bench, how: str) -> None:
    """A decode's steps, 128 tokens apart, over a cache that grows by a granule a binding every 8 steps.

    A step makes room, replays a graph of 48 attention launches and waits for it. `cold` creates handles in
    the step, `pool` has them waiting, `ahead` has a worker that commits on a stream of its own.
    """
    values: list[float] = []
    growing: list[float] = []
    shape, side = SHAPES["14b"], Stream(bench.stream.device)
    count, apart, stride = 240, 128, 1_024
    commits = 0
    for _ in range(BLOCKS):
        pool = make_pool(bench.vmm, retain=0)
        storage = MappedStorage(shape.geometry(KvLayout.SEQ_MAJOR), pool)
        controller = KvGrowthController(storage, min_bucket=stride, stride=stride)
        controller.ensure(101, stream=bench.stream.handle)
        if how == "pool":
            pool.prefill(count * apart // stride * len(storage.geometry.bindings))
        probe, layers = CudaProbe(shape, 128, bench.stream), rows_of(storage, shape)
        probe.fill(layers, 0, 100)
        probe.run(layers, Access.CAPTURE, 100)
        graph = probe._graph
        assert graph is not None
        worker = CommitAhead(controller, margin=2 * stride, stream=side.handle)
        if how == "ahead":
            worker.start()
            worker.poke(101)
            time.sleep(0.2)
        for step in range(count):
            before = controller.capacity
            with timed(values):
                controller.ensure(101 + step * apart, stream=bench.stream.handle)
                if how == "ahead":
                    worker.poke(101 + step * apart)
                graph.replay()
                bench.stream.synchronize()
            if controller.capacity > before:
                growing.append(values[-1])
        worker.stop()
        assert not worker.problems
        commits += worker.commits
        probe.close()
        storage.close()
        pool.close()
    words = {
        "cold": "handles created in the step",
        "pool": "handles waiting",
        "ahead": "memory committed ahead by a worker",
    }
    bench.add(
        f"steps/14b/{how}",
        f"steps of a decode, a growth of 96 granules every 8: {words[how]}",
        "steps while growing",
        {"step": values, "step that grows": growing},
        growths=len(growing),
        commits_by_the_worker=commits,
    )


def rows_of(storage: MappedStorage, shape: KvShape) -> list[Rows]:
    """Where each layer's rows lie, sequence-major."""
    strides = (shape.kv_heads * shape.head_dim, shape.head_dim)
    return [
        Rows(layer, storage.address_of(2 * layer), storage.address_of(2 * layer + 1), *strides)
        for layer in range(shape.layers)
    ]


def reallocation(bench: Bench, before: int, after: int, samples: int) -> None:
    """The baseline: allocate, copy every token, free."""
    geometry = geometry_14b(KvLayout.SEQ_MAJOR_BUCKET)
    calls: list[float] = []
    waits: list[float] = []
    for _ in range(BLOCKS * samples):
        pool = make_pool(bench.vmm)
        storage = ReallocStorage(geometry, pool)
        controller = KvGrowthController(storage, hard_max=geometry.capacity, min_bucket=before)
        controller.ensure(before, stream=bench.stream.handle)
        bench.stream.synchronize()
        with timed(waits):
            with timed(calls):
                controller.ensure(after, stream=bench.stream.handle)
            bench.stream.synchronize()
        copied = controller.counters.actual_copy_bytes
        storage.close()
        pool.close()
    bench.add(
        f"growth/14b-{before}-to-{after}/reallocated",
        f"{before:,} to {after:,} tokens by copying {copied:,} bytes into new buffers",
        "stall of a growth",
        {"call": calls, "call+zeroed": waits},
        copied_bytes=copied,
    )


def placement(bench: Bench, samples: int) -> None:
    """qwen2.5-0.5b: aligned to granules and packed, by the driver's own count."""
    geometry = KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, layers=24, kv_heads=2, head_dim=64, capacity=512)
    for how in BasePlacement:
        calls: list[float] = []
        taken = planned = attributed = 0
        for _ in range(BLOCKS * samples):
            with make_arena(bench.vmm, geometry, how) as arena:
                free = bench.vmm.memory_info()[0]
                with timed(calls):
                    commit(arena, 64, bench.stream)
                taken = free - bench.vmm.memory_info()[0]
                bench.stream.synchronize()
                planned, attributed = arena.mapped_bytes, arena.attributed_bytes
        bench.add(
            f"placement/0.5b/{str(how).replace('_', '-')}",
            f"0.5b, 64 tokens, {how}: {taken:,} bytes by the driver",
            "placement",
            {"call": calls},
            memory=Memory(cache_bytes=taken),
            planned_bytes=planned,
            attributed_bytes=attributed,
        )


def planning(bench: Bench) -> None:
    """Planning alone, on the host."""
    with make_arena(bench.vmm, geometry_14b(KvLayout.HEAD_MAJOR)) as arena:
        bench.add("plan/14b-head-major", "a growth of 768 stripes", "planning", {"call": plan_times(arena)})
    with make_arena(bench.vmm, geometry_14b()) as arena:
        bench.add("plan/14b-seq-major", "a growth of 96 rows", "planning", {"call": plan_times(arena)})


def plan_times(arena: VirtualArena) -> list[float]:
    values: list[float] = []
    table = GranuleTable(arena.placement)
    for _ in range(BLOCKS * 100):
        with timed(values):
            arena.planner.plan(table, 16_000)
    return values


def environment(bench: Bench) -> Environment:
    properties = bench.stream.device.properties
    gpu = Gpu(
        name=properties.name,
        compute_capability="{}.{}".format(*properties.capability),
        multiprocessors=properties.multiprocessors,
        memory_bytes=bench.vmm.memory_info()[1],
        driver="{}.{}".format(*bench.stream.device.driver.version()),
        nvrtc="{}.{}".format(*nvrtc_version()),
    )
    return capture(gpu)


def main(out: Path) -> None:
    bench = Bench()
    start = environment(bench)
    driver_calls(bench)
    growth(bench, "14b-0-to-1", geometry_14b(), 0, 1, 8)
    growth(bench, "14b-1024-to-1025", geometry_14b(), 1_024, 1_025, 8)
    growth(bench, "14b-4000-to-16000", geometry_14b(), 4_000, 16_000, 2)
    ahead(bench, geometry_14b(), 1_024, 2_048, 8)
    for how in ("cold", "pool", "ahead"):
        steps(bench, how)
    reallocation(bench, 1_024, 2_048, 4)
    reallocation(bench, 4_096, 8_192, 2)
    placement(bench, 4)
    planning(bench)
    record = Record(
        kind="gpu",
        what="What committing memory behind a growing key-value cache costs, by call and by growth",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command="python tests-gpu/measure_vmm.py OUT.json",
        suite=Suite(name="vmm", digest=hashlib.sha256(Path(__file__).read_bytes()).hexdigest()),
        environment=finish(start),
        code={name: package_digest(name) for name in ("paged_cuda", "paged_kv")},
        cases=tuple(bench.cases),
    )
    save(record, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
