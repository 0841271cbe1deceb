"""`paged-bench compare`: read both records, print the table, write the files that were asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

from paged_bench.compare.action import action_json
from paged_bench.compare.comparison import Comparison, compare
from paged_bench.compare.markdown import markdown
from paged_bench.compare.page import page
from paged_bench.compare.terminal import show
from paged_bench.compare.verdict import Verdict
from paged_bench.console import PlainConsole
from paged_bench.record import load


def run(base: Path, head: Path, values: argparse.Namespace) -> int:
    """Compare two files.

    Returns:
        0, or 1 when something became slower than `--fail-on` admits or no longer runs.

    Raises:
        BenchError: a record or the pair is refused.
        OSError: a file cannot be read or written.
    """
    comparison = compare(load(base), load(head), force=values.force)
    write(comparison, values)
    return status(comparison, values.fail_on)


def write(comparison: Comparison, values: argparse.Namespace) -> None:
    """Write each file that was asked for, then print: a reader that goes away costs no file."""
    for path, text in (
        (values.markdown, markdown),
        (values.html, page),
        (values.action, lambda comparison: action_json(comparison.head)),
    ):
        if path is not None:
            path.write_text(text(comparison), encoding="utf-8")
    show(comparison, PlainConsole())


def status(comparison: Comparison, fail_on: str) -> int:
    """Return 1 when the comparison fails by that rule, else 0."""
    red = comparison.count(Verdict.MUCH_SLOWER) + len(comparison.broken)
    warned = red + comparison.count(Verdict.SLOWER)
    return int({"never": 0, "much-slower": red, "slower": warned}[fail_on] > 0)
