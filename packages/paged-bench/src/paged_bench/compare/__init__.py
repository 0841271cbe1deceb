"""Two records compared: which cases became slower, how sure that is, and what cannot be seen."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `paged-bench compare`; the work is imported when it runs."""
    parser = commands.add_parser("compare", help="compare two records of measurements")
    parser.add_argument("base", type=Path, metavar="BASE", help="the record to compare with")
    parser.add_argument("head", type=Path, metavar="HEAD", help="the record that is judged")
    add_output_options(parser)
    parser.add_argument("--force", action="store_true", help="compare even where the machines differ")
    parser.set_defaults(run=_run)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add where the comparison goes and what makes it fail; `ab` takes the same."""
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table for a pull request")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that stands alone")
    parser.add_argument("--action", type=Path, metavar="FILE", help="write HEAD for github-action-benchmark")
    parser.add_argument(
        "--fail-on",
        choices=("slower", "much-slower", "never"),
        default="much-slower",
        help="what makes the exit status 1: from 15 %% slower, from 30 %% (the default), or nothing",
    )


def _run(values: argparse.Namespace) -> int:
    from paged_bench.compare.command import run

    return run(values.base, values.head, values)
