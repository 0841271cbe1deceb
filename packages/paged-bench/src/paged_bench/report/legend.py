"""Which shape, dash and colour belongs to whom, and the row of names that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_bench.report.svg import NORMAL, Canvas, text_width

ROW = 20
_SWATCH = 34


def legend_rows(names: Sequence[str], width: float) -> list[list[str]]:
    """Return the names cut into rows that fit the width."""
    rows: list[list[str]] = [[]]
    used = 0.0
    for name in names:
        needed = _SWATCH + text_width(name) + 10
        if rows[-1] and used + needed > width:
            rows.append([])
            used = 0.0
        rows[-1].append(name)
        used += needed
    return rows


def draw_legend(
    canvas: Canvas, series: Mapping[str, int], x: float, y: float, width: float, *, patterns: bool = False
) -> float:
    """Draw the names from `y` down and return the height they took.

    Args:
        canvas: to draw on.
        series: the style of each name, in the order in which they are shown.
        x: left end.
        y: top.
        width: room for a row.
        patterns: filled boxes, as parts of bars have them, in place of lines with markers.
    """
    rows = legend_rows(list(series), width)
    for number, row in enumerate(rows):
        left, middle = x, y + number * ROW + ROW / 2
        for name in row:
            if patterns:
                canvas.rect(left, middle - 6, 26, 12, f"p{series[name]}")
            else:
                canvas.polyline([(left, middle), (left + 26, middle)], f"l{series[name]}")
                canvas.marker(left + 13, middle, series[name], f"m{series[name]}")
            canvas.text(left + _SWATCH - 2, middle + 4, name)
            left += _SWATCH + text_width(name, NORMAL) + 10
    return len(rows) * ROW
