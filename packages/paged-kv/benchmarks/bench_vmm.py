"""What growing a cache over virtual memory costs on the host, and what a step sees of it.

    python benchmarks/bench_vmm.py                      print
    python benchmarks/bench_vmm.py --json RECORD.json   and write the record

A model of 48 layers, 8 KV heads and 128 channels with 32,768 tokens reserved. The driver is the fake one: the
first table is our own arithmetic and bookkeeping alone. The second gives the fake driver the latencies that
kvcached published for an A100 (create 193 us, map 1.45 us, set access 36 us, unmap 25.6 us), so it shows
where a growth's time goes, not what a GPU takes; sleeping adds some 60 us a call.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from paged_kv import __version__
from paged_kv.vmm import (
    BasePlacement,
    CaptureGate,
    CommitAhead,
    CommitPlanner,
    FakeVmmDriver,
    GranuleTable,
    GraphLifecycle,
    Growth,
    HandlePool,
    KvCacheGeometry,
    KvGrowthController,
    KvLayout,
    MappedStorage,
    MemoryGovernor,
    Placement,
)

GRANULE, CAPACITY = 2 << 20, 32_768
LARGE = {"layers": 48, "kv_heads": 8, "head_dim": 128}
SMALL = {"layers": 24, "kv_heads": 2, "head_dim": 64}
PUBLISHED = {"create_handle": 193e-6, "map_handle": 1.45e-6, "set_access": 36e-6, "unmap": 25.6e-6}
ONE_GRANULE = 1_024  # tokens that one granule of a binding holds

TARGETS = {
    "plan a growth, seq-major": 200.0,
    "plan a growth, head-major": 200.0,
    "plan a growth, packed": 200.0,
    "a step that needs no growth": 5.0,
    "a growth that maps nothing": None,
    "a growth of 96 granules, handles created": None,
    "a growth of 96 granules, handles pooled": None,
    "a growth of 96 granules, committed ahead": None,
    "give 96 granules back": None,
}
Samples = list[float]


def timed(operation: Callable[[], object]) -> float:
    """Microseconds that one call takes."""
    start = time.perf_counter_ns()
    operation()
    return (time.perf_counter_ns() - start) / 1_000


class Cache:
    """A controller over the fake driver."""

    def __init__(
        self,
        layout: KvLayout = KvLayout.SEQ_MAJOR,
        dims: dict[str, int] = LARGE,
        capacity: int = CAPACITY,
        placement: BasePlacement = BasePlacement.GRANULE_ALIGNED,
        *,
        latency: dict[str, float] | None = None,
        retain: int = 0,
        **options: int,
    ) -> None:
        self.driver = FakeVmmDriver(GRANULE, latency=latency)
        governor = MemoryGovernor(device=80 << 30)
        holder = governor.register("cache")
        self.pool = HandlePool(self.driver, governor, holder, retain=retain, gate=CaptureGate())
        geometry = KvCacheGeometry.uniform(layout, capacity=capacity, **dims)
        self.storage = MappedStorage(geometry, self.pool, placement)
        self.controller = KvGrowthController(self.storage, graph=GraphLifecycle(), **options)

    def grow(self, tokens: int) -> Growth:
        """A growth that must happen."""
        growth = self.controller.ensure(tokens, stream=1)
        assert isinstance(growth, Growth), growth
        self.driver.log.clear()
        return growth


def plans(layout: KvLayout, placement: BasePlacement, samples: int) -> Samples:
    """Plan the growth from 4,096 to 16,384 tokens."""
    geometry = KvCacheGeometry.uniform(layout, capacity=CAPACITY, **LARGE)
    placed = Placement.of(geometry, GRANULE, placement)
    planner, table = CommitPlanner(placed), GranuleTable(placed)
    plan = planner.plan(table, 4_096, 4_096)
    table.apply_commit(plan.cells, plan.newly_mapped.tolist(), plan.newly_mapped.tolist())
    return [timed(lambda: planner.plan(table, 16_384, 16_384)) for _ in range(samples)]


def steps(samples: int) -> Samples:
    """Ask for a length that is there, as every step does; batches of 1,000."""
    cache = Cache()
    cache.grow(4_096)
    ensure = cache.controller.ensure

    def many() -> None:
        for tokens in range(3_000, 4_000):
            ensure(tokens)

    return [timed(many) / 1_000 for _ in range(samples)]


def small_growths(samples: int) -> Samples:
    """The 24-layer model from 8 to 16 to 32 to 64 tokens: all in granules that are there."""
    times: Samples = []
    while len(times) < samples:
        cache = Cache(dims=SMALL, capacity=512, min_bucket=8)
        cache.grow(5)
        times += [timed(partial(cache.grow, tokens)) for tokens in (9, 17, 33)]
    return times


def growths(how: str, samples: int, latency: dict[str, float] | None = None) -> Samples:
    """Grow by one granule a binding, 96 in all, over and over."""
    times: Samples = []
    while len(times) < samples:
        cache = Cache(latency=latency, stride=ONE_GRANULE)
        cache.grow(1)
        for tokens in range(ONE_GRANULE, CAPACITY - ONE_GRANULE, ONE_GRANULE):
            if how == "pooled":
                cache.pool.prefill(96)
            elif how == "ahead":
                cache.controller.commit_ahead(tokens + 1, stream=2)
            times.append(timed(partial(cache.grow, tokens + 1)))
            if len(times) == samples:
                break
        cache.storage.arena.wait_idle()
    return times


def shrinks(samples: int) -> Samples:
    """Give one granule of every binding back, to the pool."""
    cache, times = Cache(stride=ONE_GRANULE, retain=96), []
    for _ in range(samples):
        cache.grow(ONE_GRANULE + 1)
        times.append(timed(lambda: cache.controller.shrink(ONE_GRANULE)))
    return times


def decode_beside_a_worker(samples: int) -> dict[str, object]:
    """Steps of 0.5 ms while a worker commits ahead, with the published latencies: what `ensure` takes."""
    cache = Cache(latency=PUBLISHED, stride=ONE_GRANULE)
    cache.grow(1)
    waits: Samples = []
    growing: Samples = []
    pause = threading.Event()
    with CommitAhead(cache.controller, margin=ONE_GRANULE, stream=2) as ahead:
        while cache.controller.committed < 2 * ONE_GRANULE:
            ahead.poke(1)
            pause.wait(0.001)
        for step in range(samples):
            tokens = 1 + step * 8
            ahead.poke(tokens)
            before = cache.controller.capacity
            waits.append(timed(lambda tokens=tokens: cache.controller.ensure(tokens, stream=1)))
            if cache.controller.capacity > before:
                growing.append(waits[-1])
            pause.wait(0.0005)
    return {
        "steps": len(waits),
        "commits_ahead": ahead.commits,
        "problems": len(ahead.problems),
        "grants_in_steps": cache.controller.counters.grants - 1,
        "growth_steps": summary(growing),
        "all_steps": summary(waits),
    }


def calibration(samples: int) -> Samples:
    """A fixed piece of NumPy work, to compare machines and moments by."""
    table = np.arange(1 << 20, dtype=np.int64)
    index = np.random.default_rng(0).integers(0, 1 << 20, 1_024)

    def work() -> None:
        for _ in range(20):
            table.take(index).sum()

    return [timed(work) for _ in range(samples)]


def summary(times: Samples) -> dict[str, object]:
    """Median, 99th percentile, extremes and the samples."""
    values = np.array(times)
    return {
        "median_us": round(float(np.median(values)), 2),
        "p99_us": round(float(np.percentile(values, 99)), 2),
        "min_us": round(float(values.min()), 2),
        "max_us": round(float(values.max()), 2),
        "samples_us": [round(value, 2) for value in times],
    }


def measure(samples: int) -> dict[str, object]:
    """Everything, as one record."""
    gc.disable()
    calibrations = calibration(50)
    aligned, packed = BasePlacement.GRANULE_ALIGNED, BasePlacement.PACKED
    results = {
        "plan a growth, seq-major": plans(KvLayout.SEQ_MAJOR, aligned, samples),
        "plan a growth, head-major": plans(KvLayout.HEAD_MAJOR, aligned, samples),
        "plan a growth, packed": plans(KvLayout.SEQ_MAJOR, packed, samples),
        "a step that needs no growth": steps(samples // 4),
        "a growth that maps nothing": small_growths(samples),
        "a growth of 96 granules, handles created": growths("cold", samples // 4),
        "a growth of 96 granules, handles pooled": growths("pooled", samples // 4),
        "a growth of 96 granules, committed ahead": growths("ahead", samples // 4),
        "give 96 granules back": shrinks(samples // 4),
    }
    gc.collect()
    simulated = {how: summary(growths(how, 30, PUBLISHED)) for how in ("cold", "pooled", "ahead")}
    beside = decode_beside_a_worker(2_000)
    calibrations += calibration(50)
    return {
        "what": "paged_kv.vmm over the fake driver: 48 layers, 8 KV heads, 128 channels, 2 MiB granules",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "paged_kv": __version__},
        "calibration": summary(calibrations),
        "operations": {name: {"target_us": TARGETS[name], **summary(results[name])} for name in TARGETS},
        "simulated_latencies_s": PUBLISHED,
        "simulated_growth_of_96_granules": simulated,
        "simulated_decode_beside_a_worker": beside,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(record: dict[str, object]) -> None:
    """The record as text."""
    print(f"{record['machine']} {record['versions']}")
    print(f"calibration: median {record['calibration']['median_us']} us")
    print(f"{'operation':44} {'median':>9} {'p99':>9} {'min':>9}   target (us)")
    for name, entry in record["operations"].items():
        target = "-" if entry["target_us"] is None else f"{entry['target_us']:g}"
        print(f"{name:44} {entry['median_us']:9.2f} {entry['p99_us']:9.2f} {entry['min_us']:9.2f}   {target}")
    print("growth of 96 granules in the step, with simulated driver latencies (us)")
    for how, entry in record["simulated_growth_of_96_granules"].items():
        print(f"  {how:10} median {entry['median_us']:10.1f}   max {entry['max_us']:10.1f}")
    beside = record["simulated_decode_beside_a_worker"]
    print(
        f"{beside['steps']} steps beside a worker: {beside['commits_ahead']} commits ahead, "
        f"{beside['grants_in_steps']} grants in a step; ensure in a growing step: median "
        f"{beside['growth_steps']['median_us']} us, max {beside['growth_steps']['max_us']} us; in any step: "
        f"median {beside['all_steps']['median_us']} us, p99 {beside['all_steps']['p99_us']} us"
    )


def main() -> None:
    """Measure, print, and write the record when asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=400, help="samples of a plan (others fewer)")
    parser.add_argument("--json", type=Path, help="where to write the record")
    options = parser.parse_args()
    record = measure(options.samples)
    show(record)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
