"""Options of `paged-bench run`, checked before the GPU is opened."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from paged_bench.errors import OptionError
from paged_bench.measure.tables import SUITES


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """What to measure and how.

    Attributes:
        suite: One of `paged_bench.measure.tables.SUITES`.
        only: Patterns of case ids; empty for all.
        peers: As `--peers` was given.
        out: The record.
        kernel: The path that the operator must take, or `auto`.
        rounds: How often every case is measured.
        delay: Share of each time that is added.
        force: Whether to measure on a GPU that is not free.
        device: The GPU's number.
        command: For the record.
    """

    suite: str
    only: tuple[str, ...]
    peers: str
    out: Path
    kernel: str
    rounds: int
    delay: float
    force: bool
    device: int
    command: str

    def wants(self, case_id: str) -> bool:
        """Return whether a case is among those to measure."""
        return not self.only or any(fnmatchcase(case_id, f"*{pattern}*") for pattern in self.only)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--suite", choices=SUITES, default="standard")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="cases whose id holds it (*, ? and [] match)",
    )
    parser.add_argument(
        "--peers",
        default="auto",
        metavar="NAMES",
        help="auto: all that are installed; none; or flashmla, flashinfer-fa3, flashinfer-fa2, vllm-triton, "
        "sdpa, flex, ort, divided by commas",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("paged-bench.json"), metavar="FILE", help="the record (%(default)s)"
    )
    parser.add_argument("--kernel", default="auto", metavar="PATH", help="auto, or sm90, sm80, baseline")
    parser.add_argument("--rounds", type=int, default=0, help="times that every case is measured (2 or 3)")
    parser.add_argument(
        "--delay",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="add this share to every time, to try compare",
    )
    parser.add_argument(
        "--force", action="store_true", help="measure on a GPU that is busy or cut into slices"
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the GPU's number (%(default)s)")


def read_options(values: argparse.Namespace) -> MeasureOptions:
    """Return the checked options.

    Raises:
        OptionError: A value is out of range.
    """
    if not 0 <= values.rounds <= 20:
        raise OptionError("--rounds", f"{values.rounds} was given, it must be 1 to 20")
    if not 0 <= values.delay <= 10:
        raise OptionError("--delay", f"{values.delay:g} was given, it must lie in [0, 10]")
    return MeasureOptions(
        suite=values.suite,
        only=tuple(values.only),
        peers=values.peers,
        out=values.out,
        kernel=values.kernel,
        rounds=values.rounds or (3 if values.suite == "standard" else 2),
        delay=values.delay,
        force=values.force,
        device=values.device,
        command=_command(values),
    )


def _command(values: argparse.Namespace) -> str:
    words: list[str] = ["paged-bench", "run", "--suite", values.suite]
    for pattern in values.only:
        words += ["--only", pattern]
    plain: Sequence[tuple[str, object, object]] = (
        ("--peers", values.peers, "auto"),
        ("--kernel", values.kernel, "auto"),
        ("--rounds", values.rounds, 0),
        ("--delay", values.delay, 0.0),
        ("--device", values.device, 0),
    )
    for name, value, default in plain:
        if value != default:
            words += [name, str(value)]
    return " ".join(words + ["--force"] * values.force)
