"""Scales, ticks and frames of charts with two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paged_bench.report.svg import SMALL, Canvas


@dataclass(frozen=True)
class LogScale:
    """A logarithmic scale from values to pixels; `low` and `high` are the ends of the axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return round values: of 1, 2 and 5 in each decade where there is room, else 1 alone."""
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = _round_values(self.low, self.high, steps)
            if len(found) <= most:
                return found
        return found[:: math.ceil(len(found) / most)]


def _round_values(low: float, high: float, steps: tuple[int, ...]) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = (step * 10.0**decade for decade in decades for step in steps)
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def around(values: Sequence[float], margin: float = 1.25) -> tuple[float, float]:
    """Return the ends of an axis that holds all values with some room.

    Example:
        >>> around([10.0, 40.0], 2.0)
        (5.0, 80.0)
    """
    return min(values) / margin, max(values) * margin


def tick_text(value: float) -> str:
    """Return a tick's label.

    Example:
        >>> [tick_text(value) for value in (0.5, 20.0, 131072.0, 1e6)]
        ['0.5', '20', '131,072', '1,000,000']
    """
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


@dataclass(frozen=True)
class Frame:
    """The rectangle of one panel, with its two scales."""

    x: LogScale
    y: LogScale

    def draw(
        self,
        canvas: Canvas,
        *,
        x_title: str,
        y_title: str,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
    ) -> None:
        """Draw grid, ticks and the titles of both axes."""
        left, right, top, bottom = self.x.start, self.x.end, self.y.end, self.y.start
        for value in y_ticks:
            canvas.line(left, self.y(value), right, self.y(value))
            canvas.text(left - 6, self.y(value) + 4, tick_text(value), kind="muted", size=SMALL, anchor="end")
        for value in x_ticks:
            canvas.line(self.x(value), top, self.x(value), bottom)
            label = tick_text(value)
            canvas.text(self.x(value), bottom + 16, label, kind="muted", size=SMALL, anchor="middle")
        canvas.line(left, bottom, right, bottom, "axis")
        canvas.line(left, top, left, bottom, "axis")
        canvas.text((left + right) / 2, bottom + 34, x_title, kind="muted", size=SMALL, anchor="middle")
        canvas.text(left, top - 8, y_title, kind="muted", size=SMALL)
