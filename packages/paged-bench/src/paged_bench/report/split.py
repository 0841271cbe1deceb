"""The time of one step, split into its kernels."""

from __future__ import annotations

from collections.abc import Sequence

from paged_bench.record import Record
from paged_bench.report.data import Split, splits
from paged_bench.report.legend import draw_legend
from paged_bench.report.svg import SMALL, Canvas

_ROW = 40
MOST = 12


def step_split(records: Sequence[Record], width: int) -> str | None:
    """Return the drawing, or None where no step was timed beside its parts."""
    found = _one_of_each(splits(records))[:MOST]
    if not found:
        return None
    names = list(dict.fromkeys(name for split in found for name, _ in split.parts))
    top = 60
    canvas = Canvas(
        width, top + _ROW * len(found) + 12, "Time of one step by kernel",
        "Each bar is one step; its parts are the shares of its kernels, with the microseconds beside it.",
    )  # fmt: skip
    canvas.text(12, 20, "One step, split into its kernels", size=14)
    draw_legend(canvas, _styles(names), 12, 28, width - 24, patterns=True)
    for index, split in enumerate(found):
        _draw_bar(canvas, split, names, top + index * _ROW, width)
    return canvas.render()


def _styles(names: Sequence[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


def _one_of_each(found: Sequence[Split]) -> list[Split]:
    """Return the first step of each size: more heads and other pages divide it much alike."""
    kept: dict[tuple[float, ...] | str, Split] = {}
    for split in found:
        shape = split.case.shape
        kept.setdefault((shape.batch, shape.context, shape.query) if shape else split.case.id, split)
    return list(kept.values())


def _draw_bar(canvas: Canvas, split: Split, names: Sequence[str], y: float, width: int) -> None:
    total, room, left = sum(us for _, us in split.parts), width - 24, 12.0
    shape = split.case.shape
    sizes = f", {shape.heads} heads, {shape.head_size}/{shape.v_head_size}" if shape and width > 500 else ""
    title = split.case.title if sizes[2:10] in split.case.title else f"{split.case.title}{sizes}"
    figures = " + ".join(f"{us:.1f}" for _, us in split.parts)
    canvas.text(12, y + 12, title, size=SMALL)
    step = f", together {split.step_us:.1f}" if split.step_us else ""
    canvas.text(width - 12, y + 12, f"{figures}{step} µs", size=SMALL, anchor="end", kind="muted")
    for name, us in split.parts:
        part = room * us / total
        canvas.rect(
            left, y + 16, part, 16, f"p{_styles(names)[name]}", f"{name}: {us:.1f} µs, {us / total:.0%}"
        )
        left += part
