"""How cost grows when a size grows: the same axes for the page authority and for the attention kernels."""

from __future__ import annotations

from collections.abc import Sequence

from paged_bench.record import Record
from paged_bench.report.axes import Frame, LogScale
from paged_bench.report.data import OURS, points
from paged_bench.report.latency import Over, lines_over
from paged_bench.report.legend import ROW, draw_legend, legend_rows
from paged_bench.report.svg import SMALL, Canvas

Line = list[tuple[float, float]]
DESCRIPTION = (
    "Both axes are factors over the smallest size. A flat line costs the same whatever the size; the dashed "
    "diagonal grows in proportion."
)


def growth(records: Sequence[Record], width: int) -> str | None:
    """Return the drawing, or None where nothing was measured at two sizes."""
    lines = {name: line for name, line in _lines(records).items() if len(line) > 1}
    if not lines:
        return None
    names = list(lines)
    rows = len(legend_rows(names, width - 24))
    top, height = 56 + rows * ROW, 260
    canvas = Canvas(width, top + height + 52, "Growth of cost", DESCRIPTION)
    canvas.text(12, 20, "Growth of cost", size=14)
    draw_legend(canvas, {name: index for index, name in enumerate(names)}, 12, 28, width - 24)
    x_high = max(x for line in lines.values() for x, _ in line) * 1.15
    y_high = max(2.0, *(y for line in lines.values() for _, y in line)) * 1.3
    y_low = min(0.7, *(y * 0.8 for line in lines.values() for _, y in line))
    frame = Frame(LogScale(0.9, x_high, 50, width - 16), LogScale(y_low, y_high, top + height, top))
    ticks = [float(2**power) for power in range(12)]
    frame.draw(
        canvas,
        x_title="size, times the smallest",
        y_title="cost, times that of the smallest",
        x_ticks=[tick for tick in ticks[:: 1 if width > 500 else 2] if tick <= x_high],
        y_ticks=[tick for tick in (*(1 / tick for tick in ticks[:0:-1]), *ticks) if y_low <= tick <= y_high],
    )
    end = min(x_high, y_high)
    canvas.polyline([(frame.x(1), frame.y(1)), (frame.x(end), frame.y(end))], "guide")
    canvas.text(frame.x(end) - 8, frame.y(end) + 16, "in proportion", kind="muted", size=SMALL, anchor="end")
    for index, line in enumerate(lines.values()):
        canvas.polyline([(frame.x(x), frame.y(y)) for x, y in line], f"l{index}")
        for x, y in line:
            canvas.marker(
                frame.x(x), frame.y(y), index, f"m{index}", f"{names[index]}: {x:.3g} times, {y:.2f} times"
            )
    return canvas.render()


def _lines(records: Sequence[Record]) -> dict[str, Line]:
    found = points(records)
    lines: dict[str, Line] = {}
    axes: tuple[tuple[Over, str], ...] = (("context", "context"), ("batch", "sequences"))
    for over, name in axes:
        for panel in lines_over(found, over)[:1]:
            lines[f"attention, {name} ({panel.title})"] = _relative(
                [(x, y) for x, y, _ in panel.lines.get(OURS, [])]
            )
    for name, line in _page_authority(records).items():
        lines[f"page authority, {name}"] = _relative(line)
    return lines


def _page_authority(records: Sequence[Record]) -> dict[str, Line]:
    """Return the decode step over contexts at their own pools, and over pools at the smallest context."""
    sizes: dict[tuple[float, float], float] = {}
    for record in records:
        for case in record.cases:
            context, pool, samples = (*map(case.parameters.get, ("context", "pool")), case.samples())
            if not isinstance(context, int | float) or not isinstance(pool, int | float) or samples is None:
                continue
            if context > 0 and pool > 0:
                sizes.setdefault((float(context), float(pool)), samples.median)
    smallest: dict[float, float] = {}
    for context, pool in sizes:
        smallest[context] = min(pool, smallest.get(context, pool))
    by_context = [(context, sizes[context, pool]) for context, pool in smallest.items()]
    least = min(smallest, default=0.0)
    return {
        "context": by_context,
        "pool": [(pool, us) for (context, pool), us in sizes.items() if context == least],
    }


def _relative(line: Line) -> Line:
    ordered = sorted(line)
    return [(x / ordered[0][0], y / ordered[0][1]) for x, y in ordered]
