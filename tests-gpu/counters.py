"""Reads hardware counters of a tensor-core path's kernels with Nsight Compute and prints a table.

usage: python tests-gpu/counters.py sm80|sm90 OUT.json

Every case runs once to warm up and once under `ncu`, which replays each kernel alone, with cold caches and
unlocked clocks: durations here are not those of a step, shares and ratios are what counts. Needs `ncu` on the
PATH, and a driver that lets this user read counters.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from paged_bench.measure.bench import Bench
from paged_bench.measure.counters import CudaCounters
from paged_bench.measure.inputs import Footprint, InputMaker, Pool, host_plans
from paged_bench.measure.step import operator_of, run_step
from paged_bench.measure.suite import CaseSpec
from paged_bench.measure.tables import decode, mixed, prefill, ragged
from paged_cuda import Device, require_driver

SECTIONS = ("SpeedOfLight", "WarpStateStats", "LaunchStats", "SchedulerStats", "MemoryWorkloadAnalysis")
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "DRAM %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "DRAM read MB": ("dram__bytes_read.sum", 1e-6),
    "DRAM write MB": ("dram__bytes_write.sum", 1e-6),
    "L2 %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "tensor pipe %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1.0),
    "issue slots %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "SM cycles, mean": ("sm__cycles_active.avg", 1.0),
    "SM cycles, most": ("sm__cycles_active.max", 1.0),
    "SM cycles, least": ("sm__cycles_active.min", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
}
_STALL = "smsp__average_warps_issue_stalled_"
STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "wait",
    "barrier",
    "mio_throttle",
    "lg_throttle",
    "math_pipe_throttle",
    "imc_miss",
    "no_instruction",
    "branch_resolve",
    "membar",
    "sleeping",
    "drain",
)


def cases_of(path: str) -> list[CaseSpec]:
    """Return what is counted of `path`."""
    shapes = ((1, 4096), (1, 32_768), (128, 4096))
    narrow = {"head_size": 192, "v_head_size": 128}
    batches = ((64, 4096), (128, 8192), (16, 8192), (256, 1024))
    if path == "sm80":
        return [
            *(decode(*shape, 16) for shape in (*shapes, *batches)),
            decode(1, 4096, 64),
            ragged(16),
            decode(64, 4096, 16, **narrow),
        ]
    return [
        *(decode(*shape, 64) for shape in (*shapes, *batches, (1, 131_072))),
        *(decode(*shape, 128) for shape in ((16, 8192), (128, 4096), (1, 4096), (64, 4096))),
        decode(128, 4096, 96),
        decode(128, 4096, 128, block_size=16),
        decode(64, 4096, 64, **narrow),
        prefill(16),
        prefill(128),
        prefill(16, 192, 128),
        mixed(64, 4096, 2048, 128),
    ]


def counted(path: str) -> None:
    """Run the cases of `path`; the child of `ncu`."""
    bench = Bench(Device(require_driver(), 0), CudaCounters())
    pool = Pool(bench)
    for spec in cases_of(path):
        operator = operator_of(spec, bench.device, kernel=path).prepare()
        cache = pool.view(spec, Footprint.of(spec).cache)
        inputs = InputMaker(bench, spec).make(0, host_plans(spec, 1)[0], cache)
        run_step(operator, inputs, bench.stream.handle)
        bench.stream.synchronize()
        with bench.device:
            driver.cuProfilerStart()
            run_step(operator, inputs, bench.stream.handle)
            bench.stream.synchronize()
            driver.cuProfilerStop()


def read(text: str, labels: list[str]) -> list[dict[str, Any]]:
    """Return one row a kernel from ncu's CSV page of raw values, which holds a line of units.

    Every case begins with append.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]
    found = []
    case = -1
    for row in rows:
        case += row["Kernel Name"].startswith("append")
        entry: dict[str, Any] = {"case": labels[case], "kernel": row["Kernel Name"]}
        for label, (metric, factor) in METRICS.items():
            entry[label] = _number(row, metric, factor)
        stalls = {name: _number(row, f"{_STALL}{name}_per_issue_active.ratio", 1.0) for name in STALLS}
        entry["stall cycles an instruction"] = {
            name: value for name, value in sorted(stalls.items(), key=lambda item: -(item[1] or 0)) if value
        }
        found.append(entry)
    return found


def _number(row: dict[str, str], metric: str, factor: float) -> float | None:
    text = (row.get(metric) or "").replace(",", "")
    return round(float(text) * factor, 3) if text else None


def main(path: str, out: Path) -> None:
    stalls = [f"{_STALL}{name}_per_issue_active.ratio" for name in STALLS]
    metrics = ",".join([*(metric for metric, _ in METRICS.values()), *stalls])
    sections = [word for name in SECTIONS for word in ("--section", name)]
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", *sections, "--metrics", metrics, sys.executable, __file__]
    done = subprocess.run([*command, path, "--counted"], capture_output=True, text=True, check=False)
    rows = read(done.stdout, [spec.label for spec in cases_of(path)])
    if not rows:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    if sys.argv[2] == "--counted":
        counted(sys.argv[1])
    else:
        main(sys.argv[1], Path(sys.argv[2]))
