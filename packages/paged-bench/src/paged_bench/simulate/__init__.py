"""Size a page pool for your own traffic: replay arrivals through the page authority with a time model.

`add_parser` hangs the command on a command line; `main` runs it by itself. Nothing heavy is imported before.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["add_parser", "main"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate` to the subcommands of a parser; the parsed values get a `run` callable."""
    from paged_bench.simulate.options import add_options

    parser = commands.add_parser("simulate", help="size a page pool for a trace of requests")
    add_options(parser)
    parser.set_defaults(run=_run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulator alone; returns the exit status.

    Args:
        arguments: Command-line words; None takes those of the process.
    """
    from paged_bench.simulate.options import add_options

    parser = argparse.ArgumentParser(prog="paged-bench simulate")
    add_options(parser)
    return _run(parser.parse_args(arguments))


def _run(values: argparse.Namespace) -> int:
    from paged_bench.simulate.command import run
    from paged_bench.simulate.options import read_options

    return run(read_options(values))
