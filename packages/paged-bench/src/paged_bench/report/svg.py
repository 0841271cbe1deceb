"""A small SVG writer.

Invariant: the same calls give the same bytes everywhere. Numbers have at most two decimals; nothing depends
on installed fonts, on time, or on the order of a set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias
from xml.sax import saxutils

from paged_bench.plain import plain
from paged_bench.report.style import CSS, PATTERNS

Anchor: TypeAlias = Literal["start", "middle", "end"]
SMALL, NORMAL, LARGE = 11, 12, 14


def number(value: float) -> str:
    """Return a coordinate.

    Example:
        >>> number(3.0), number(2.346), number(-0.001)
        ('3', '2.35', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def text_width(text: str, size: int = NORMAL) -> float:
    """Return about how wide a text is: a little more than common sans-serif fonts take."""
    wide = sum(1.0 if letter in "mwMW@…" else 0.35 if letter in " .,:;il|'·" else 0.62 for letter in text)
    return wide * size


def escape(text: str) -> str:
    """Return the text as it may stand between tags and in attributes."""
    return saxutils.escape(plain(text), {'"': "&quot;"})


class Canvas:
    """Elements of one drawing, in painting order.

    Args:
        width: of the drawing, in CSS pixels at its natural size.
        height: of the drawing.
        title: what a screen reader says first.
        description: what the drawing shows, in words.
    """

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width = width
        self.height = height
        self._title = title
        self._description = description
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> None:
        """Draw a straight line of a class of the style sheet."""
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self._parts.append(f'<line class="{kind}" {ends}/>')

    def polyline(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> None:
        """Draw a rectangle; `hint` is shown when a pointer rests on it."""
        box = f'x="{number(x)}" y="{number(y)}" width="{number(max(0, width))}" height="{number(height)}"'
        self._parts.append(_with_hint("rect", f'class="{kind}" {box}', hint))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        kind: str = "ink",
        size: int = NORMAL,
        anchor: Anchor = "start",
        turned: bool = False,
    ) -> None:
        """Write one line; `y` is the baseline, `turned` reads upwards."""
        turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if turned else ""
        place = f'x="{number(x)}" y="{number(y)}" font-size="{size}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{kind}" {place}{turn}>{escape(text)}</text>')

    def marker(self, x: float, y: float, shape: int, kind: str, hint: str = "", size: float = 4.5) -> None:
        """Draw one of the shapes that tell series apart without colour."""
        path = _SHAPES[shape % len(_SHAPES)](x, y, size)
        self._parts.append(_with_hint("path", f'class="{kind}" d="{path}"', hint))

    def render(self) -> str:
        """Return the drawing as a self-contained SVG document."""
        background = f'<rect class="paper" width="{number(self.width)}" height="{number(self.height)}"/>'
        return self._wrap(f"<style>{CSS}</style>\n<defs>{PATTERNS}</defs>\n{background}\n")

    def inline(self) -> str:
        """Return the drawing for a page that holds the style sheet and the patterns once."""
        return self._wrap("")

    def _wrap(self, head: str) -> str:
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}" width="{number(self.width)}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} height="{number(self.height)}" role="img" '
            'font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self._title)}</title>\n<desc>{escape(self._description)}</desc>\n"
            + head
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def _with_hint(tag: str, attributes: str, hint: str) -> str:
    return f"<{tag} {attributes}><title>{escape(hint)}</title></{tag}>" if hint else f"<{tag} {attributes}/>"


def _closed(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points) + "Z"


def _circle(x: float, y: float, r: float) -> str:
    arc = f"a{number(r)} {number(r)} 0 1 0"
    return f"M{number(x - r)} {number(y)}{arc} {number(2 * r)} 0{arc} {number(-2 * r)} 0Z"


def _square(x: float, y: float, r: float) -> str:
    side = r * 0.9
    return _closed([(x - side, y - side), (x + side, y - side), (x + side, y + side), (x - side, y + side)])


def _triangle(x: float, y: float, r: float) -> str:
    return _closed([(x, y - 1.2 * r), (x + 1.1 * r, y + 0.9 * r), (x - 1.1 * r, y + 0.9 * r)])


def _pointing_down(x: float, y: float, r: float) -> str:
    return _closed([(x, y + 1.2 * r), (x + 1.1 * r, y - 0.9 * r), (x - 1.1 * r, y - 0.9 * r)])


def _diamond(x: float, y: float, r: float) -> str:
    return _closed([(x, y - 1.3 * r), (x + 1.1 * r, y), (x, y + 1.3 * r), (x - 1.1 * r, y)])


def _plus(x: float, y: float, r: float) -> str:
    thin, long = 0.4 * r, 1.2 * r
    corners = [(thin, long), (thin, thin), (long, thin), (long, -thin), (thin, -thin), (thin, -long)]
    corners += [(-a, -b) for a, b in corners]
    return _closed([(x + a, y + b) for a, b in corners])


def _cross(x: float, y: float, r: float) -> str:
    thin, long, half = 0.4 * r, 1.2 * r, math.sqrt(0.5)
    corners = [(thin, long), (thin, thin), (long, thin), (long, -thin), (thin, -thin), (thin, -long)]
    corners += [(-a, -b) for a, b in corners]
    return _closed([(x + (a - b) * half, y + (a + b) * half) for a, b in corners])


def _hexagon(x: float, y: float, r: float) -> str:
    turns = [math.pi / 3 * step for step in range(6)]
    return _closed([(x + 1.1 * r * math.cos(turn), y + 1.1 * r * math.sin(turn)) for turn in turns])


def _bar(x: float, y: float, r: float) -> str:
    wide, thin = 1.3 * r, 0.55 * r
    return _closed([(x - wide, y - thin), (x + wide, y - thin), (x + wide, y + thin), (x - wide, y + thin)])


def _hourglass(x: float, y: float, r: float) -> str:
    return _closed([(x - r, y - 1.1 * r), (x + r, y - 1.1 * r), (x - r, y + 1.1 * r), (x + r, y + 1.1 * r)])


_SHAPES = (
    *(_circle, _square, _triangle, _diamond, _pointing_down),
    *(_cross, _plus, _hexagon, _bar, _hourglass),
)
