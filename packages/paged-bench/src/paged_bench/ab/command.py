"""`paged-bench ab`: base, head, head, base, … as many rounds as asked, then the comparison."""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from paged_bench.ab.sides import Side, sides, turn
from paged_bench.compare.command import status, write
from paged_bench.compare.comparison import compare
from paged_bench.errors import BenchError, OptionError
from paged_bench.record import Record, joined, load, save
from paged_bench.terminable import Terminable


def run(values: argparse.Namespace) -> int:
    """Measure both sides in turns and compare.

    Returns:
        As `paged-bench compare`.

    Raises:
        BenchError: a side cannot be measured, or an interrupt; whole rounds until then are in the output.
        OSError: a record cannot be written.
    """
    root = values.root.resolve()
    if values.select and values.suite != "cpu":
        raise OptionError("--select", "chooses benchmarks of the CPU suite alone", "leave it out")
    values.out.mkdir(parents=True, exist_ok=True)
    with Terminable(), sides(root, values.base) as both:
        _measure(both, root, values)
    base, head = (load(values.out / f"{name}.json") for name in ("base", "head"))
    comparison = compare(base, head)
    write(comparison, values)
    return status(comparison, values.fail_on)


def _words(values: argparse.Namespace) -> list[str]:
    if values.suite != "cpu":
        return ["run", "--suite", values.suite, "--rounds", "1", "--peers", "none"]
    return ["cpu", "--blocks", "1", "--root", str(values.root.resolve()), "--select", values.select]


def _measure(both: tuple[Side, Side], root: Path, values: argparse.Namespace) -> None:
    """Run the turns, every second round in the other order, and keep both records after each round."""
    rounds, words = values.rounds, _words(values)
    session = f"{rounds} rounds from {datetime.now(UTC).isoformat(timespec='seconds')}"
    turns: dict[str, list[Record]] = {side.name: [] for side in both}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            try:
                fresh = {}
                for side in both if number % 2 == 0 else both[::-1]:
                    sys.stderr.write(f"round {number + 1} of {rounds}: {side.name}\n")
                    fresh[side.name] = turn(side, root, words, Path(folder) / f"{number}-{side.name}.json")
            except KeyboardInterrupt:
                kept = f"{number} of {rounds} rounds are in {values.out.name}"
                raise BenchError("ab", "interrupted", kept) from None
            for side in both:
                turns[side.name].append(fresh[side.name])
                record = _as_one(side, turns[side.name], rounds, session)
                save(record, values.out / f"{side.name}.json")


def _as_one(side: Side, turns: list[Record], rounds: int, session: str) -> Record:
    first, last = turns[0], turns[-1]
    ended = next((one.stopped for one in turns if one.stopped), None)
    if len(turns) < rounds:
        ended = f"after {len(turns)} of {rounds} rounds"
    load = (first.environment.load or (0.0, 0.0))[0], (last.environment.load or (0.0, 0.0))[1]
    return last.model_copy(
        update={
            "created": first.created,
            "command": f"paged-bench ab, the {side.name}",
            "session": session,
            "stopped": ended,
            "revision": side.revision,
            "environment": last.environment.model_copy(update={"load": load}),
            "cases": joined([one.cases for one in turns]),
        }
    )
