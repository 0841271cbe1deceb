"""Ratio to the floor as a heat map: cases down, implementations across, the number in every cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from paged_bench.record import Record, Shape
from paged_bench.report.data import Point, implementations, points
from paged_bench.report.svg import SMALL, Canvas, text_width

BINS = (1.1, 1.25, 1.5, 2.0, 4.0)  # upper ends; the sixth is open
Key: TypeAlias = tuple[str, int, int, float, int, float, int]
_ROW, _WIDEST_BAR, _ROOMY = 22, 1000.0, 30


def heat_map(records: Sequence[Record], width: int) -> str | None:
    """Return the drawing, or None where nothing has a floor."""
    found = [point for point in points(records) if point.ratio is not None and point.standard]
    if not found:
        return None
    names = implementations(found)
    cells: dict[Key, dict[str, Point]] = {}
    for point in found:
        cells.setdefault(_key(point), {}).setdefault(point.implementation, point)
    keys = sorted(cells)
    groups = dict.fromkeys(_heading(cells[key]) for key in keys)
    label = 12 + max(text_width(_label(next(iter(row.values())).shape), SMALL) for row in cells.values())
    head = 40 + max(text_width(name, SMALL) for name in names)
    canvas = Canvas(
        width, head + _ROW * (len(keys) + len(groups)) + 60, "Ratio to the floor",
        "Median time over the floor of the same run: 1 is as fast as the machine reads or multiplies.",
    )  # fmt: skip
    canvas.text(12, 20, "Median over floor (1 = the machine's limit)", size=14)
    room = (width - label - 12) / len(names)
    for index, name in enumerate(names):
        canvas.text(label + (index + 0.5) * room + 4, head - 6, name, size=SMALL, turned=True)
    y, heading = head, ""
    for key in keys:
        row = cells[key]
        if _heading(row) != heading:
            heading = _heading(row)
            canvas.text(12, y + 15, heading, kind="muted", size=SMALL)
            y += _ROW
        canvas.text(12, y + 15, _label(next(iter(row.values())).shape), size=SMALL)
        for index, name in enumerate(names):
            _draw_cell(canvas, row.get(name), (label + index * room, y, room))
        y += _ROW
    _draw_scale(canvas, y + 14, width)
    return canvas.render()


def _key(point: Point) -> Key:
    shape = point.shape
    # Ragged lengths are drawn anew by each suite; they are about alike.
    context = 0.0 if shape.context_range or shape.query_range else shape.context
    sizes = (shape.heads, shape.query, shape.batch, context, shape.block_size)
    return (shape.dtype, -shape.head_size, *sizes)


def _heading(row: dict[str, Point]) -> str:
    shape = next(iter(row.values())).shape
    dtype = "" if shape.dtype == "bfloat16" else f", {shape.dtype}"
    return f"{shape.head_size}/{shape.v_head_size}, {shape.heads} heads{dtype}"


def _label(shape: Shape) -> str:
    page = "" if shape.block_size == 64 else f", p {shape.block_size}"
    if shape.query_range:
        return f"{shape.batch} mixed{page}"
    if shape.context_range:
        return f"{shape.batch} ragged{page}"
    query = "" if shape.query == 1 else f", q {shape.query:,.0f}"
    return f"{shape.batch} x {shape.context:,.0f}{query}{page}"


def _draw_cell(canvas: Canvas, point: Point | None, place: tuple[float, float, float]) -> None:
    x, y, room = place
    if point is None or point.ratio is None:
        canvas.rect(x + 1, y + 1, room - 2, _ROW - 2, "none")
        return
    level = sum(point.ratio > end for end in BINS)
    hint = f"{point.implementation}, {point.case.title}: {point.us:.1f} µs, {point.ratio:.2f} times the floor"
    canvas.rect(x + 1, y + 1, room - 2, _ROW - 2, f"h{level}", hint)
    share = min(1.0, math.log(max(1.0, point.ratio)) / math.log(_WIDEST_BAR))
    canvas.rect(x + 1, y + _ROW - 4, (room - 2) * share, 3, "bar")
    canvas.text(
        x + room / 2,
        y + 14,
        _digits(point.ratio, room),
        kind=f"i{level}",
        size=10 if room >= 30 else 9,
        anchor="middle",
    )


def _digits(ratio: float, room: float) -> str:
    if room >= _ROOMY:
        return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}" if ratio < 999.5 else f"{ratio / 1e3:.1f}k"


def _draw_scale(canvas: Canvas, y: float, width: int) -> None:
    names = [f"to {end:g}" for end in BINS] + [f"over {BINS[-1]:g}"]
    room = (width - 24) / len(names)
    for level, name in enumerate(names):
        canvas.rect(12 + level * room, y, room - 2, 16, f"h{level}")
        canvas.text(12 + (level + 0.5) * room, y + 12, name, kind=f"i{level}", size=10, anchor="middle")
    canvas.text(12, y + 32, "The bar at the foot of a cell grows with the ratio.", kind="muted", size=10)
