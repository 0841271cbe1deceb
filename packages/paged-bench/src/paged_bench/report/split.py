"""The time of one step, split into its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_bench.record import Record
from paged_bench.report.data import Split, splits
from paged_bench.report.legend import ROW, draw_legend, legend_rows
from paged_bench.report.svg import SMALL, Canvas

_ROW, _WIDE = 40, 500
MOST = 12


def step_split(records: Sequence[Record], width: int) -> str | None:
    """Return the drawing, or None where no step was timed beside its parts."""
    found = _one_of_each(splits(records))[:MOST]
    if not found:
        return None
    names = dict.fromkeys(name for split in found for name, _ in split.parts)
    series = {name: index for index, name in enumerate(names)}
    wide = width >= _WIDE
    row = _ROW if wide else _ROW + 16  # the figures get a line of their own
    top = 40 + len(legend_rows(list(names), width - 24)) * ROW
    canvas = Canvas(
        width, top + row * len(found) + 12, "Time of one step by kernel",
        "Each bar is one step; its parts are the shares of its kernels, with the microseconds beside it.",
    )  # fmt: skip
    canvas.text(12, 20, "One step, split into its kernels", size=14)
    draw_legend(canvas, series, 12, 28, width - 24, patterns=True)
    for index, split in enumerate(found):
        y = top + index * row
        _draw_words(canvas, split, y, wide)
        _draw_bar(canvas, split, series, y + row - 24)
    return canvas.render()


def _one_of_each(found: Sequence[Split]) -> list[Split]:
    """Return the first step of each size: more heads and other pages divide it much alike."""
    kept: dict[tuple[float, ...] | str, Split] = {}
    for split in found:
        shape = split.case.shape
        kept.setdefault((shape.batch, shape.context, shape.query) if shape else split.case.id, split)
    return list(kept.values())


def _draw_words(canvas: Canvas, split: Split, y: float, wide: bool) -> None:
    figures = " + ".join(f"{us:,.1f}" for _, us in split.parts)
    step = f", together {split.step_us:,.1f}" if split.step_us else ""
    canvas.text(12, y + 12, split.case.title, size=SMALL)
    if wide:
        canvas.text(canvas.width - 12, y + 12, f"{figures}{step} µs", size=SMALL, anchor="end", kind="muted")
    else:
        canvas.text(12, y + 27, f"{figures}{step} µs", size=SMALL, kind="muted")


def _draw_bar(canvas: Canvas, split: Split, series: Mapping[str, int], y: float) -> None:
    total, room, left = sum(us for _, us in split.parts), canvas.width - 24, 12.0
    for name, us in split.parts:
        part, hint = room * us / total, f"{name}: {us:.1f} µs, {us / total:.0%}"
        canvas.rect(left, y, part, 16, f"p{series[name]}", hint)
        left += part
