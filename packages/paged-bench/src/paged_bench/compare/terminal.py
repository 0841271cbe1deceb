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

_WIDE = 110  # columns from which on everything fits
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
    wide = width >= _WIDE
    names = ("base", "head", "change", "95 % interval", "noise") if wide else ("base", "head", "change")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("case", ratio=1)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.rows:
        figures = [time_text(row.base_us), time_text(row.head_us), change_text(row)]
        figures += [interval_text(row), f"{row.noise:.1%}"] if wide else []
        words = f"{row.verdict.flag} {row.verdict.word}"
        table.add_row(words, Text(name_text(row)), *figures, style=_STYLES[row.verdict])
    return table
