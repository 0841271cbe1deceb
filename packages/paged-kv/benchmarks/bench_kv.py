"""What the page authority costs on one core, and what a step costs as contexts and pools grow.

    python benchmarks/bench_kv.py                      print
    python benchmarks/bench_kv.py --json RECORD.json   and write the record

1,024 sequences of about 32,768 tokens, block 16. Every sample times one operation; the calibration loop of
the same run says how fast the machine was meanwhile, so that two records can be compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paged_kv import (
    CacheKey,
    IndexPlanBuffers,
    KVCacheManager,
    PageGeometry,
    PrefixChain,
    StepTransaction,
    __version__,
)

ROWS, CONTEXT, SIZE = 1_024, 32_768, 16

TARGETS = {
    "decode step": (60.0, 250.0),
    "full table rebuild": (350.0, 1_000.0),
    "8,192-token prefill plan": (80.0, 300.0),
    "release 1,024 pages": (100.0, None),
    "fork 924 pages": (10.0, None),
    "truncate 1,024 rows": (150.0, None),
    "lookup and pin 2,048 pages": (120.0, None),
    "hash 32,768 tokens": (1_300.0, None),
}
Samples = list[float]
Int64Array = npt.NDArray[np.int64]


def timed(operation: Callable[[], object]) -> float:
    """Microseconds that one call takes."""
    start = time.perf_counter_ns()
    operation()
    return (time.perf_counter_ns() - start) / 1_000


def begin(kv: KVCacheManager, rows: Int64Array, lengths: Int64Array) -> StepTransaction:
    """A step that is known to fit."""
    step = kv.begin_step(rows, lengths)
    assert isinstance(step, StepTransaction), step
    return step


def run(kv: KVCacheManager, rows: Int64Array, lengths: Int64Array) -> None:
    """One whole step."""
    step = begin(kv, rows, lengths)
    step.commit()
    kv.complete(step.epoch)


def filled(
    rows: int, context: int, *, spare: int = 64, extra_pages: int = 0
) -> tuple[KVCacheManager, Int64Array]:
    """A manager with `rows` sequences of about `context` tokens, which cross pages at different steps."""
    columns = (context + spare) // SIZE + 32
    geometry = PageGeometry(rows * (context // SIZE + spare // SIZE + 4) + 1 + extra_pages, SIZE)
    kv = KVCacheManager(geometry, max_sequences=rows + 8, max_blocks_per_sequence=columns)
    handles, rng = kv.create(rows), np.random.default_rng(0)
    lengths = context - rng.integers(0, SIZE, rows)
    for start in range(0, rows, 128):
        run(kv, handles[start : start + 128], lengths[start : start + 128])
    return kv, rng.permutation(handles)


def decode_steps(kv: KVCacheManager, rows: Int64Array, samples: int) -> Samples:
    """Reserve, validate, plan into buffers, commit: one token a row, permuted batch order."""
    buffers = IndexPlanBuffers(len(rows), len(rows), kv.view().cells.shape[1])
    ones, times = np.ones(len(rows), dtype=np.int64), []

    def step() -> StepTransaction:
        transaction = begin(kv, rows, ones)
        transaction.plan(buffers)
        transaction.commit()
        return transaction

    while len(times) < samples:
        for _ in range(min(64, samples + 2 - len(times))):
            start = time.perf_counter_ns()
            done = step()
            times.append((time.perf_counter_ns() - start) / 1_000)
            kv.complete(done.epoch)
        kv.truncate(rows, kv.view().seq_len[rows & 0xFFFFFF] - 64)
        kv.complete(step().epoch)
        del times[-1:]
    return times[2:]


def rebuilds(kv: KVCacheManager, rows: Int64Array, samples: int) -> Samples:
    """Plan into buffers that show nothing yet."""
    buffers = IndexPlanBuffers(len(rows), len(rows), kv.view().cells.shape[1])
    with begin(kv, rows, np.ones(len(rows), dtype=np.int64)) as step:
        step.plan(buffers)
        times = []
        for _ in range(samples):
            buffers._last_slots = None
            buffers._shown[:] = 0  # as if every row were new, without the cost of padding the memory again
            times.append(timed(lambda: step.plan(buffers)))
    return times


def prefills(samples: int) -> Samples:
    """Plan 8,192 query tokens of eight rows into buffers."""
    kv, rows = filled(16, 4_096, spare=2_048)
    buffers = IndexPlanBuffers(8, 8_192, kv.view().cells.shape[1])
    times = []
    for _ in range(samples):
        with begin(kv, rows[:8], np.full(8, 1_024, dtype=np.int64)) as step:
            times.append(timed(lambda step=step: step.plan(buffers)))
        kv.complete(step.epoch)
    return times


def releases(samples: int) -> Samples:
    """Release one row of 1,024 pages."""
    kv = KVCacheManager(PageGeometry(4_096, SIZE), max_sequences=4, max_blocks_per_sequence=1_024)
    times = []
    for _ in range(samples):
        row = kv.create(1)
        run(kv, row, np.array([1_024 * SIZE]))
        times.append(timed(lambda row=row: kv.release(row)))
    return times


def forks(samples: int) -> Samples:
    """Fork one row of 924 pages."""
    kv = KVCacheManager(PageGeometry(4_096, SIZE), max_sequences=4, max_blocks_per_sequence=1_024)
    row = kv.create(1)
    run(kv, row, np.array([924 * SIZE]))
    times, new = [], row
    for _ in range(samples):
        start = time.perf_counter_ns()
        new = kv.fork(row[0])
        times.append((time.perf_counter_ns() - start) / 1_000)
        kv.release(new)
    return times


def truncations(kv: KVCacheManager, rows: Int64Array, samples: int) -> Samples:
    """Take one page off each of 1,024 rows."""
    times = []
    for _ in range(samples):
        lengths = kv.view().seq_len[rows & 0xFFFFFF]
        times.append(timed(lambda lengths=lengths: kv.truncate(rows, lengths - SIZE)))
        run(kv, rows, np.full(len(rows), SIZE, dtype=np.int64))
    return times


def prefixes(samples: int) -> tuple[Samples, Samples]:
    """Look up and pin 2,048 cached pages; hash the 32,768 tokens that name them."""
    key = CacheKey(model="bench", dtype="float16", layout="LATENT")
    tokens = np.random.default_rng(0).integers(0, 50_000, CONTEXT + 1)
    kv = KVCacheManager(PageGeometry(4_096, SIZE), max_sequences=4, max_blocks_per_sequence=2_100)
    row = kv.create(1)
    run(kv, row, np.array([CONTEXT]))
    chain = PrefixChain(key, SIZE)
    chain.extend(tokens[:CONTEXT])
    kv.register(row[0], chain)
    kv.release(row)
    looks, hashes = [], []
    for _ in range(samples):
        other = PrefixChain(key, SIZE)
        hashes.append(timed(lambda other=other: other.extend(tokens)))
        start = time.perf_counter_ns()
        hit = kv.lookup_and_pin(other)
        looks.append((time.perf_counter_ns() - start) / 1_000)
        assert len(hit.pages) == CONTEXT // SIZE
        hit.drop()
    return looks, hashes


def calibration(samples: int) -> Samples:
    """A fixed piece of NumPy work, to compare machines and moments by."""
    table = np.arange(1 << 20, dtype=np.int64)
    index = np.random.default_rng(0).integers(0, 1 << 20, 1_024)

    def work() -> None:
        for _ in range(20):
            table.take(index).sum()

    return [timed(work) for _ in range(samples)]


def curve(samples: int) -> list[dict[str, float]]:
    """A decode step of 256 rows: longer contexts, then larger pools."""
    points = []
    for context, extra in ((512, 0), (2_048, 0), (8_192, 0), (32_768, 0), (512, 1 << 19), (512, 1 << 21)):
        kv, rows = filled(256, context, extra_pages=extra)
        times = decode_steps(kv, rows, samples)
        points.append(
            {"context": context, "pool": kv.geometry.num_blocks, "median_us": float(np.median(times))}
        )
        del kv
        gc.collect()
    return points


def summary(times: Samples) -> dict[str, object]:
    """Median, 99th percentile and the samples."""
    values = np.array(times)
    return {
        "median_us": round(float(np.median(values)), 2),
        "p99_us": round(float(np.percentile(values, 99)), 2),
        "min_us": round(float(values.min()), 2),
        "samples_us": [round(value, 2) for value in times],
    }


def measure(samples: int) -> dict[str, object]:
    """Everything, as one record."""
    gc.disable()
    calibrations = [calibration(50)]
    kv, rows = filled(ROWS, CONTEXT)
    results = {
        "decode step": decode_steps(kv, rows, samples),
        "full table rebuild": rebuilds(kv, rows, samples // 4),
        "truncate 1,024 rows": truncations(kv, rows, samples // 4),
        "8,192-token prefill plan": prefills(samples),
        "release 1,024 pages": releases(samples // 2),
        "fork 924 pages": forks(samples),
    }
    calibrations.append(calibration(50))
    results["lookup and pin 2,048 pages"], results["hash 32,768 tokens"] = prefixes(samples // 4)
    points = curve(samples // 4)
    calibrations.append(calibration(50))
    return {
        "what": "paged_kv on one core: 1,024 sequences x 32k tokens, block 16, microseconds",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "paged_kv": __version__},
        "calibration": summary([value for values in calibrations for value in values]),
        "operations": {name: {"target_us": TARGETS[name], **summary(results[name])} for name in TARGETS},
        "curve": points,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(record: dict[str, object]) -> None:
    """The record as text."""
    print(f"{record['machine']} {record['versions']}")
    print(f"calibration: median {record['calibration']['median_us']} us")
    print(f"{'operation':28} {'median':>9} {'p99':>9} {'min':>9}   target median / p99 (us)")
    for name, entry in record["operations"].items():
        target = " / ".join("-" if value is None else f"{value:g}" for value in entry["target_us"])
        print(f"{name:28} {entry['median_us']:9.1f} {entry['p99_us']:9.1f} {entry['min_us']:9.1f}   {target}")
    print("decode step of 256 rows")
    for point in record["curve"]:
        print(f"  context {point['context']:6}  pool {point['pool']:8}  median {point['median_us']:6.1f} us")


def main() -> None:
    """Measure, print, and write the record when asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=400, help="samples of a decode step (others fewer)")
    parser.add_argument("--json", type=Path, help="where to write the record")
    options = parser.parse_args()
    record = measure(options.samples)
    show(record)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
