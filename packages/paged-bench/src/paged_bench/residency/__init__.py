"""How much memory a key-value cache takes, and what its growth costs: a decode in every variant, counted.

`add_parser` hangs the command on a command line. Nothing heavy is imported before it runs.
"""

from __future__ import annotations

import argparse

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `residency` to the subcommands of a parser; the parsed values get a `run` callable."""
    from paged_bench.residency.options import add_options

    parser = commands.add_parser("residency", help="memory and growth of key-value caches, by a real decode")
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(values: argparse.Namespace) -> int:
    from paged_bench.residency.command import run
    from paged_bench.residency.options import read_options

    return run(read_options(values))
