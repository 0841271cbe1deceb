"""The roofline: how close every implementation comes to what the machine can read and multiply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paged_bench.record import Record
from paged_bench.report.axes import Frame, LogScale, around
from paged_bench.report.data import Point, implementations, points, present, styles
from paged_bench.report.legend import ROW, draw_legend, legend_rows
from paged_bench.report.style import SERIES
from paged_bench.report.svg import SMALL, Canvas

TITLE = "Roofline"
DESCRIPTION = (
    "Operations a second over operations a byte of the cache, both logarithmic. The line is what the machine "
    "reads and multiplies at best in the same run; a point on the line cannot be faster."
)
_FURTHEST = 4096.0  # operations a byte; prefill lies far to the right, where only the flat part is
_DODGE = 0.4  # peers stand up to this share to the right, so that more can be seen and none above the line


def roofline(records: Sequence[Record], width: int) -> str | None:
    """Return the drawing, or None where no record has points with counted work."""
    found = [point for point in points(records) if point.standard and _intensity(point) <= _FURTHEST]
    ordered = [*present(records), *records]
    roofs = [roof for record in ordered if (roof := _roof(record)) is not None]
    if not found or not roofs:
        return None
    names, (read, matmul) = implementations(found), roofs[0]
    rows = len(legend_rows(names, width - 24))
    top, height = 56 + rows * ROW, 380
    canvas = Canvas(width, top + height + 52, TITLE, DESCRIPTION)
    canvas.text(12, 20, "Roofline: TFLOP/s over operations a byte", size=14)
    draw_legend(canvas, styles(names), 12, 28, width - 24)
    frame = _frame(found, matmul, width, top, height)
    ticks = frame.x.ticks(8 if width > 500 else 5), frame.y.ticks(8)
    frame.draw(
        canvas,
        x_title="operations a byte of the cache",
        y_title="TFLOP/s",
        x_ticks=ticks[0],
        y_ticks=ticks[1],
    )
    _draw_roof(canvas, frame, read, matmul)
    for point in reversed(found):  # ours on top
        _draw_point(canvas, frame, point, styles(names))
    return canvas.render()


def _roof(record: Record) -> tuple[float, float] | None:
    """Return bytes and operations a second of this run."""
    read, matmul = record.ceiling("read"), record.ceiling("matmul", "bfloat16")
    return (read, matmul) if read and matmul else None


def _intensity(point: Point) -> float:
    """Return operations a byte; infinite where either was not counted, which keeps the point out."""
    counted = point.work is not None and point.work.bytes > 0 and point.work.operations > 0
    return point.work.operations / point.work.bytes if point.work and counted else math.inf


def _place(point: Point) -> tuple[float, float]:
    assert point.work is not None
    return _intensity(point), point.work.operations / point.us / 1e6


def _frame(found: Sequence[Point], matmul: float, width: int, top: float, height: float) -> Frame:
    xs, ys = zip(*map(_place, found), strict=True)
    x_low, x_high = around(xs, 2.0)
    y_low, y_high = around([*ys, matmul / 1e12], 1.5)
    return Frame(LogScale(x_low, x_high, 56, width - 16), LogScale(y_low, y_high, top + height, top))


def _draw_roof(canvas: Canvas, frame: Frame, read: float, matmul: float) -> None:
    """Draw the slope from the left edge, or from the bottom where it leaves the panel, to the flat part."""
    slope, flat, ridge = read / 1e12, matmul / 1e12, matmul / read
    start = max(frame.x.low, frame.y.low / slope)
    corners = [(start, start * slope), (ridge, flat), (frame.x.high, flat)]
    canvas.polyline([(frame.x(x), frame.y(y)) for x, y in corners], "roof")
    canvas.text(frame.x.end - 4, frame.y(flat) - 7, f"{flat:.0f} TFLOP/s", size=SMALL, anchor="end")
    canvas.text(frame.x.start + 8, frame.y.end + 14, f"slope: {read / 1e12:.2f} TB/s", size=SMALL)


def _draw_point(canvas: Canvas, frame: Frame, point: Point, series: Mapping[str, int]) -> None:
    style = series[point.implementation]
    x, y = _place(point)
    shifted = x * (1 + _DODGE) ** (style / SERIES)
    note = " (history)" if point.history else ""
    hint = f"{point.implementation}{note}, {point.case.title}: {point.us:.1f} µs, {y:.1f} TFLOP/s"
    canvas.marker(frame.x(shifted), frame.y(y), style, f"m{style}", hint, 3.5)
