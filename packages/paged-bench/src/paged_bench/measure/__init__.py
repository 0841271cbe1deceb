"""`paged-bench run`: the GPU operator and its peers, checked first and then timed, into one record.

`add_parser` hangs the command on a command line. Nothing heavy is imported before it runs.
"""

from __future__ import annotations

import argparse

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the subcommands of a parser; the parsed values get a `run` callable."""
    from paged_bench.measure.options import add_options

    parser = commands.add_parser("run", help="check and time the operator and its peers on this GPU")
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(values: argparse.Namespace) -> int:
    from paged_bench.measure.command import run
    from paged_bench.measure.options import read_options

    return run(read_options(values))
