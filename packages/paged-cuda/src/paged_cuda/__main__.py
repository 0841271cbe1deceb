"""`python -m paged_cuda`: look at the machine, or compile kernels without a GPU.

Exit status 0 is success, 2 is a refusal, told in one line, 130 an interrupt and 141 a reader that went away.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def _doctor(arguments: argparse.Namespace) -> int:
    from paged_cuda.doctor import examine, render

    print(render(examine(), as_json=arguments.json))
    return 0


def _compile(arguments: argparse.Namespace) -> int:
    from paged_cuda.compiler import compile_kernels
    from paged_cuda.cubin_cache import CubinCache
    from paged_cuda.variants import ARCHITECTURES, variants_for

    if arguments.out is None and not arguments.check:
        return _refuse("compile needs --out DIR to keep the kernels, or --check to throw them away")
    chosen = ARCHITECTURES if arguments.all else tuple(arguments.arch or ())
    unknown = sorted(set(chosen) - set(ARCHITECTURES))
    if unknown or not chosen:
        given = ", ".join(unknown) or "no architecture"
        return _refuse(f"got {given}; --arch takes {', '.join(ARCHITECTURES)}, --all takes them all")
    jobs = [
        (variant.signature, architecture) for architecture in chosen for variant in variants_for(architecture)
    ]
    cache = None if arguments.out is None else CubinCache(arguments.out, required=True)
    kernels = compile_kernels(jobs, cache)
    for kernel in kernels:
        used = kernel.resources
        print(
            f"{kernel.architecture:8} {kernel.signature.symbol:40} {used.registers:3} registers "
            f"{used.local_bytes:4} local {used.shared_bytes:6} shared {len(kernel.cubin):8} bytes"
        )
    print(f"{len(kernels)} kernels for {len(chosen)} architectures")
    if arguments.report is not None:
        from paged_cuda.resource_report import write_report

        write_report(kernels, arguments.report)
    return 0


def _table(arguments: argparse.Namespace) -> int:
    from paged_cuda.resource_report import read_report, to_markdown

    print(to_markdown(read_report(arguments.report)[1]))
    return 0


def _refuse(message: str) -> int:
    print(f"paged_cuda: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paged_cuda", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what this machine offers")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)
    compile_ = commands.add_parser("compile", help="compile every shipped kernel; needs no GPU")
    compile_.add_argument("--arch", action="append", help="an architecture such as sm_90a; may be repeated")
    compile_.add_argument("--all", action="store_true", help="every shipped architecture")
    compile_.add_argument("--out", type=Path, help="the folder to fill, for PAGED_CUDA_CACHE_DIR")
    compile_.add_argument("--check", action="store_true", help="keep nothing")
    compile_.add_argument("--report", type=Path, help="a file for registers and shared memory, as JSON")
    compile_.set_defaults(command=_compile)
    table = commands.add_parser("table", help="print a report of compile as Markdown")
    table.add_argument("report", type=Path)
    table.set_defaults(command=_table)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    chosen = _parser().parse_args(arguments)
    from paged_cuda.errors import PagedCudaError

    try:
        status = int(chosen.command(chosen))
        if sys.stdout is not None:
            sys.stdout.flush()
    except PagedCudaError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("paged_cuda: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _throw_output_away()
        return 141
    except OSError as error:
        _throw_output_away()
        return _refuse(f"standard output: {error.strerror or error}")
    return status


def _throw_output_away() -> None:
    # Python flushes standard output once more at exit, which must find a place to write to.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
