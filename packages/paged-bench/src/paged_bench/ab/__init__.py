"""Base and head measured in turns on one machine: the comparison that load and heat cannot bend."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `paged-bench ab`; the work is imported when it runs."""
    from paged_bench.compare import add_output_options

    parser = commands.add_parser("ab", help="measure a revision and this tree in turns, and compare")
    parser.add_argument("--base", required=True, metavar="REV", help="the git revision to compare with")
    parser.add_argument(
        "--suite", default="cpu", metavar="NAME", help="cpu (the default), or a suite of `paged-bench run`"
    )
    parser.add_argument(
        "--rounds", type=_count, default=4, metavar="N", help="turns of each side (default: 4)"
    )
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="cpu only: as pytest -k has it")
    parser.add_argument(
        "--root", type=Path, default=Path(), metavar="DIR", help="the source tree (default: this folder)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("paged-bench-ab"), metavar="DIR", help="where both records go"
    )
    add_output_options(parser)
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    value = int(text)
    if not 2 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{value} is not between 2 and 100")
    return value


def _run(values: argparse.Namespace) -> int:
    from paged_bench.ab.command import run

    return run(values)
