"""The command line: subcommands, and one place where an error becomes one line and an exit status.

Exit status 0 is success, 2 is bad input or a machine that cannot do what was asked, 130 is an
interrupt, 141 a reader that went away. Heavy imports happen inside the subcommand that needs them.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO, TypeAlias

from paged_bench.errors import BenchError

_BAD_INPUT, _INTERRUPTED, _BROKEN_PIPE = 2, 130, 141


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `paged-bench`; returns the exit status.

    Args:
        arguments: Command-line words; None takes those of the process.
    """
    _limit_threads()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    if sys.stdout is None:
        sys.stderr.write(
            "paged-bench: error: standard output is closed; send it to /dev/null to do without\n"
        )
        return _BAD_INPUT
    _settle_streams()
    try:
        options = _parser().parse_args(arguments)
        status = int(options.run(options))
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("paged-bench: interrupted\n")
        return _INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which must find a place to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except Exception as error:
        if not _is_advice(error):
            raise
        words = [str(error) or "not enough memory", *getattr(error, "__notes__", ())]
        sys.stderr.write(f"paged-bench: error: {' '.join('; '.join(words).split())}\n")
        return _BAD_INPUT
    return status


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    # Subparsers take the class of this object, whatever the type says.
    parser: argparse.ArgumentParser = _Parser(
        prog="paged-bench", description="The demo and the measurements of paged attention."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_simulate(commands)
    _add_measurements(commands)
    _add_residency(commands)
    return parser


def _add_demo(commands: Commands) -> None:
    from paged_bench.demo.options import add_options, read_options

    def run(values: argparse.Namespace) -> int:
        from paged_bench.demo.command import run as run_demo

        return run_demo(read_options(values))

    demo = commands.add_parser("demo", help="decode real text through pages and paged attention")
    add_options(demo)
    demo.set_defaults(run=run)


def _add_simulate(commands: Commands) -> None:
    from paged_bench.simulate import add_parser

    add_parser(commands)


def _add_measurements(commands: Commands) -> None:
    from paged_bench import ab, cite, compare, cpu, measure, report

    for command in (measure, cpu, compare, ab, report, cite):
        command.add_parser(commands)


def _add_residency(commands: Commands) -> None:
    from paged_bench.residency import add_parser

    add_parser(commands)


def _limit_threads() -> None:
    """Give BLAS half of the processors, at most four; must run before NumPy is imported.

    A step's matrices are thin. Threads of BLAS wait for each other by spinning, so one more than the machine
    has to spare makes a step many times slower, and one fewer costs little.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, min(4, (os.cpu_count() or 1) // 2))))


def _settle_streams() -> None:
    """Let no character stop the output, and keep a warning on one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, *_: f"paged-bench: warning: {message}\n"


def _is_advice(error: Exception) -> bool:
    """Whether the error is the input's or the machine's: ours, the file system's, or a typed one from below.

    The page authority's errors are not among them: this package checks what it asks for, so they are bugs.
    """
    if isinstance(error, (BenchError, OSError, MemoryError)):
        return True
    bases = (("paged_schema", "PagedSchemaError"), ("paged_cuda", "PagedCudaError"))
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in bases)
    return any(isinstance(error, base) for base in loaded if base is not None)
