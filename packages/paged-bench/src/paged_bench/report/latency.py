"""Microseconds of a call as one size grows: the context of one sequence, or the number of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paged_bench.record import Record
from paged_bench.report.axes import Frame, LogScale, around
from paged_bench.report.data import OURS, Point, implementations, points, styles
from paged_bench.report.legend import ROW, draw_legend, legend_rows
from paged_bench.report.svg import Canvas

Over = Literal["context", "batch"]
HEADS_SHOWN = 3
_GAP, _LEFT, _PANEL = 62, 50, 260


@dataclass(frozen=True)
class Lines:
    """One panel: for each implementation its sizes and microseconds."""

    title: str
    lines: dict[str, list[tuple[float, float, Point]]]


def latency(records: Sequence[Record], width: int, over: Over) -> str | None:
    """Return the drawing, or None where no implementation has two sizes."""
    panels = lines_over(points(records), over)
    if not panels:
        return None
    shown = [point for panel in panels for line in panel.lines.values() for _, _, point in line]
    names = implementations(shown)
    rows = len(legend_rows(names, width - 24))
    columns = len(panels) if width > 500 else 1
    top = 60 + rows * ROW
    height = top + -(-len(panels) // columns) * (_PANEL + _GAP)
    what = "the context of one sequence" if over == "context" else "the number of sequences of 4,096 tokens"
    canvas = Canvas(
        width, height, f"Latency over {what}", "Microseconds, both axes logarithmic; lower is faster."
    )
    short = "context" if over == "context" else "sequences of 4,096"
    canvas.text(12, 20, f"µs of attention over {what if width > 500 else short}", size=14)
    draw_legend(canvas, styles(names), 12, 28, width - 24)
    limits = around([us for panel in panels for line in panel.lines.values() for _, us, _ in line])
    for index, panel in enumerate(panels):
        room = (width - 8) / columns
        left, y = index % columns * room, top + index // columns * (_PANEL + _GAP)
        _draw(canvas, panel, names, (left + _LEFT, left + room - 14, y, y + _PANEL), limits, over)
    return canvas.render()


def lines_over(found: Sequence[Point], over: Over) -> list[Lines]:
    """Return a panel for each number of heads at 576/512, pages of 64, one new token a sequence."""
    panels: dict[int, Lines] = {}
    for point in found:
        shape = point.shape
        plain = (shape.head_size, shape.v_head_size, shape.block_size, shape.query) == (576, 512, 64, 1.0)
        fixed = shape.batch == 1 if over == "context" else shape.context == 4096
        if not (plain and fixed and point.standard and shape.dtype == "bfloat16") or shape.context_range:
            continue
        panel = panels.setdefault(shape.heads, Lines(f"{shape.heads} heads", {}))
        size = shape.context if over == "context" else float(shape.batch)
        line = panel.lines.setdefault(point.implementation, [])
        if size not in [known for known, _, _ in line]:
            line.append((size, point.us, point))
    for panel in panels.values():
        for name in [name for name, line in panel.lines.items() if len(line) < 2]:
            del panel.lines[name]
    kept = [panels[heads] for heads in sorted(panels) if panels[heads].lines]
    ours = [panel for panel in kept if OURS in panel.lines]
    return (ours or kept)[:HEADS_SHOWN]


def _draw(
    canvas: Canvas,
    panel: Lines,
    names: Sequence[str],
    box: tuple[float, float, float, float],
    limits: tuple[float, float],
    over: Over,
) -> None:
    left, right, top, bottom = box
    sizes = sorted({size for line in panel.lines.values() for size, _, _ in line})
    frame = Frame(LogScale(*around(sizes, 1.3), left, right), LogScale(*limits, bottom, top))
    title = "tokens of context" if over == "context" else "sequences"
    frame.draw(canvas, x_title=title, y_title=f"µs, {panel.title}", x_ticks=sizes, y_ticks=frame.y.ticks(9))
    for name, line in sorted(panel.lines.items(), key=lambda item: -names.index(item[0])):
        series = styles(names)[name]
        places = [(frame.x(size), frame.y(us)) for size, us, _ in sorted(line, key=lambda entry: entry[0])]
        canvas.polyline(places, f"l{series}")
        for size, us, point in line:
            hint = f"{name}{' (history)' if point.history else ''}, {point.case.title}: {us:.1f} µs"
            canvas.marker(frame.x(size), frame.y(us), series, f"m{series}", hint)
