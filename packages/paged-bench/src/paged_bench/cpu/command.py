"""`paged-bench cpu`: several blocks of the benchmarks, kept after each, as one record."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table
from rich.text import Text

from paged_bench.compare.words import time_text
from paged_bench.console import PlainConsole
from paged_bench.cpu.block import benchmark_files, run_block, suite_digest
from paged_bench.errors import BenchError
from paged_bench.record import (
    Case,
    Record,
    Suite,
    capture,
    finish,
    joined,
    package_digest,
    revision,
    save,
)

UNDER_TEST = ("paged_schema", "paged_oracle", "paged_kv", "paged_cuda")


def run(root: Path, out: Path, *, select: str, blocks: int) -> int:
    """Measure and write the record.

    Returns:
        0, or 1 when a benchmark failed.

    Raises:
        BenchError: nothing can be run, or an interrupt; what was measured until then is in `out`.
        OSError: the record cannot be written.
    """
    files = benchmark_files(root.resolve())
    _try(out)
    started, environment, done = datetime.now(UTC), capture(), list[tuple[Case, ...]]()
    what = "The schema, the oracle and the page authority on the processor."
    record = Record(
        kind="cpu",
        what=what,
        created=started.isoformat(timespec="seconds"),
        command=" ".join(["paged-bench cpu", *([f"--select '{select}'"] if select else [])]),
        stopped="no block was finished",
        revision=revision(root),
        suite=Suite(name="cpu", digest=suite_digest(files)),
        code={package: package_digest(package) for package in UNDER_TEST},
        environment=environment,
        cases=(),
    )
    for number in range(1, blocks + 1):
        sys.stderr.write(f"block {number} of {blocks}\n")
        try:
            done.append(run_block(files, select))
        except KeyboardInterrupt:
            kept = f"{out.name} holds {len(done)} of {blocks} blocks" if done else "no block was finished"
            raise BenchError("cpu suite", "interrupted", kept) from None
        missing = None if number == blocks else f"after {number} of {blocks} blocks"
        record = record.model_copy(
            update={"stopped": missing, "environment": finish(environment), "cases": joined(done)}
        )
        save(record, out)
    show(record)
    return int(any(case.failed for case in record.cases))


def _try(out: Path) -> None:
    """Find out before the first benchmark that a place cannot be written to, and leave it as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = not out.exists()
    out.open("a").close()
    if fresh:
        out.unlink()


def show(record: Record) -> None:
    """Print the medians."""
    table = Table()
    table.add_column("case", overflow="fold")
    for name in ("median", "quartiles", "samples"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in record.cases:
        samples = case.samples()
        if samples is None:
            table.add_row(Text(case.title), "failed", Text(case.failed or ""), "")
            continue
        low, high = samples.quartiles or (samples.median, samples.median)
        spread = f"{time_text(low)} … {time_text(high)}"
        table.add_row(Text(case.title), time_text(samples.median), spread, str(len(samples.values)))
    PlainConsole().print(table)
