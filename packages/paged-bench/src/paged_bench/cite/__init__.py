"""What pages may cite: tables and figures of records, and whether their kernels are still present."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `paged-bench record`; the work is imported when it runs."""
    parser = commands.add_parser("record", help="check records, mark them as history, print their tables")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="say whether records are whole and of the present kernels")
    check.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    history = actions.add_parser("history", help="mark a record as one of earlier sources")
    history.add_argument("record", type=Path, metavar="RECORD")
    history.add_argument("--because", required=True, metavar="TEXT", help="what changed since")
    table = actions.add_parser("table", help="print a record as a Markdown table")
    table.add_argument("record", type=Path, metavar="RECORD")
    table.add_argument("--only", default="*", metavar="PATTERN", help="cases whose ids match, as in a shell")
    parser.set_defaults(run=_run)


def _run(values: argparse.Namespace) -> int:
    from paged_bench.cite.command import check, mark, show

    if values.action == "check":
        return check(values.records)
    if values.action == "history":
        return mark(values.record, values.because)
    return show(values.record, values.only)
