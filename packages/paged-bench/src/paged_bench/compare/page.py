"""The comparison as a page that stands alone, each change drawn with its interval."""

from __future__ import annotations

import math

from paged_bench.compare.comparison import Comparison
from paged_bench.compare.limits import limits
from paged_bench.compare.markdown import LEGEND
from paged_bench.compare.verdict import ALARM, WARN, Row, Verdict
from paged_bench.compare.words import (
    change_text,
    headline,
    interval_text,
    machine_lines,
    name_text,
    side_text,
    time_text,
)
from paged_bench.report.page import Column, document, table
from paged_bench.report.svg import Canvas, escape

_WIDTH, _HEIGHT, _REACH = 150, 22, 2.0  # the drawing ends at half and at twice the time
_SERIES = {Verdict.MUCH_SLOWER: 4, Verdict.SLOWER: 1, Verdict.UNCLEAR: 7, Verdict.SAME: 0, Verdict.FASTER: 2}
_SHAPE = {Verdict.MUCH_SLOWER: 2, Verdict.SLOWER: 2, Verdict.UNCLEAR: 5, Verdict.SAME: 0, Verdict.FASTER: 4}


def page(comparison: Comparison) -> str:
    """Return the page."""
    columns: list[tuple[str, Column]] = [
        *(("", "whole"), ("case", "whole")),
        *(("base", "figure"), ("head", "figure"), ("change", "figure"), ("noise", "figure")),
        *(("95 % interval", "figure long"), ("half to twice", "long")),
    ]
    quiet = {Verdict.SAME, Verdict.UNCLEAR}
    rows = [(row.verdict not in quiet, _cells(row)) for row in comparison.rows]
    parts = [f"<h1>{escape(headline(comparison))}</h1>"]
    parts += [f"<p>{side}: {escape(side_text(comparison, side))}</p>" for side in ("base", "head")]
    if rows:
        parts.append(table(columns, rows, LEGEND))
    if comparison.unmatched:
        shown = [
            (one.state == "fails now", [escape(one.state), escape(name_text(one)), escape(one.why)])
            for one in comparison.unmatched
        ]
        parts.append("<h2>On one side only</h2>")
        names: list[tuple[str, Column]] = [("state", "whole"), ("case", "whole"), ("why", "whole")]
        parts.append(table(names, shown, "Nothing was compared."))
    parts.append("<h2>What this cannot see</h2>")
    parts.append(
        "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in limits(comparison)) + "</ul>"
    )
    machine = "".join(f"<li>{name}: {escape(value)}</li>" for name, value in machine_lines(comparison))
    parts.append(f'<h2>Machine</h2><ul class="quiet">{machine}</ul>')
    return document("Benchmark comparison", "\n".join(parts))


def _cells(row: Row) -> list[str]:
    verdict = f'<span title="{escape(row.why)}">{row.verdict.flag} {row.verdict.word}</span>'
    figures = [time_text(row.base_us), time_text(row.head_us), change_text(row)]
    return [verdict, escape(name_text(row)), *figures, f"{row.noise:.1%}", interval_text(row), _drawing(row)]


def _drawing(row: Row) -> str:
    canvas = Canvas(_WIDTH, _HEIGHT, change_text(row), f"{row.verdict.word}, interval {interval_text(row)}")
    middle, series = _HEIGHT / 2, _SERIES[row.verdict]
    for threshold in (2 - WARN, WARN, ALARM):
        canvas.line(_place(threshold), 3, _place(threshold), _HEIGHT - 3)
    canvas.line(_place(1.0), 1, _place(1.0), _HEIGHT - 1, "axis")
    if row.ratio is not None:
        ends = [(_place(row.ratio.low), middle), (_place(row.ratio.high), middle)]
        canvas.polyline(ends, f"l{series} whole")
    canvas.marker(_place(row.head_us / row.base_us), middle, _SHAPE[row.verdict], f"m{series}")
    return canvas.inline()


def _place(ratio: float) -> float:
    share = math.log(ratio) / math.log(_REACH)
    return _WIDTH / 2 + max(-1.0, min(1.0, share)) * (_WIDTH / 2 - 6)
