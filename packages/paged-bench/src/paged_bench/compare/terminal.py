"""The comparison as a table on a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paged_bench.compare.comparison import Comparison
from paged_bench.compare.limits import limits
from paged_bench.compare.verdict import Verdict
from paged_bench.compare.words import (
    change_text,
    headline,
    interval_text,
    name_text,
    side_text,
    time_text,
)
from paged_bench.plain import plain

_WIDTHS = (66, 110)  # columns from which on more fits
_COLUMNS = (("change",), ("base", "head", "change"), ("base", "head", "change", "95 % interval", "noise"))
_STYLES = {
    Verdict.MUCH_SLOWER: "bold red",
    Verdict.SLOWER: "yellow",
    Verdict.UNCLEAR: "dim",
    Verdict.SAME: "",
    Verdict.FASTER: "green",
}


def show(comparison: Comparison, console: Console) -> None:
    """Print the headline, the table, the unmatched cases and the limits."""
    console.print(headline(comparison), style="bold", highlight=False)
    for side in ("base", "head"):
        console.print(f"{side}: {plain(side_text(comparison, side))}", highlight=False, markup=False)
    if comparison.rows:
        console.print(_table(comparison, console.width))
    for one in comparison.unmatched:
        why = f": {plain(one.why)}" if one.why else ""
        console.print(f"{one.state}: {name_text(one)}{why}", highlight=False, markup=False)
    for sentence in limits(comparison):
        console.print(f"- {plain(sentence)}", style="dim", highlight=False, markup=False)


def _table(comparison: Comparison, width: int) -> Table:
    names = _COLUMNS[sum(width >= least for least in _WIDTHS)]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("case", ratio=1, overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.rows:
        figures = {
            "base": time_text(row.base_us),
            "head": time_text(row.head_us),
            "change": change_text(row),
            "95 % interval": interval_text(row),
            "noise": f"{row.noise:.1%}",
        }
        words = f"{row.verdict.flag} {row.verdict.word}" if names[1:] else row.verdict.flag
        table.add_row(
            words, Text(name_text(row)), *(figures[name] for name in names), style=_STYLES[row.verdict]
        )
    return table
