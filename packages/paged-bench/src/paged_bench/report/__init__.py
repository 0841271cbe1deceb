"""Records as pictures: static SVG and HTML, the same bytes for the same records."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `paged-bench report`; the work is imported when it runs."""
    parser = commands.add_parser("report", help="draw records as SVG and as one page")
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD", help="the records to draw")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.set_defaults(run=_run)


def _run(values: argparse.Namespace) -> int:
    from paged_bench.report.command import run

    return run(values.records, values.out)
