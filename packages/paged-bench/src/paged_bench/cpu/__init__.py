"""The suite that needs no GPU: the schema, the oracle and the page authority on the processor."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `paged-bench cpu`; the work is imported when it runs."""
    parser = commands.add_parser("cpu", help="time the schema, the oracle and the page authority")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the record to write")
    add_suite_options(parser)
    parser.set_defaults(run=_run)


def add_suite_options(parser: argparse.ArgumentParser) -> None:
    """Add what chooses the benchmarks; `ab` takes the same."""
    parser.add_argument(
        "--root", type=Path, default=Path(), metavar="DIR", help="the source tree (default: this folder)"
    )
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="only these, as pytest -k has it")
    parser.add_argument(
        "--blocks", type=_count, default=3, metavar="N", help="times that each benchmark is run (default: 3)"
    )


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and 100")
    return value


def _run(values: argparse.Namespace) -> int:
    from paged_bench.cpu.command import run

    return run(values.root, values.out, select=values.select, blocks=values.blocks)
