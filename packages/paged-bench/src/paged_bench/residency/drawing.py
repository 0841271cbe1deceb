"""Strings of SVG that read the same in light and dark, and without colour: shape and dash tell lines apart.

The bytes depend on what is drawn alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
svg { --paper: #ffffff; --ink: #1d2733; --faint: #8a94a0; --grid: #d9dee4;
  --one: #0b62a8; --two: #b3470f; --three: #4f7a1f; --four: #7a3f9d; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14181d; --ink: #e6eaee; --faint: #9aa4af; --grid: #333b44;
    --one: #6cb6f5; --two: #f2a36b; --three: #a5cf70; --four: #cfa3ea; }
}
text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.title { font-size: 15px; font-weight: 600; }
.note { fill: var(--faint); font-size: 11px; }
.paper { fill: var(--paper); }
.grid { stroke: var(--grid); stroke-width: 1; }
.line { fill: none; stroke-width: 2; }
.one { stroke: var(--one); } .two { stroke: var(--two); } .three { stroke: var(--three); }
.four { stroke: var(--four); }
.fill-one { fill: var(--one); } .fill-two { fill: var(--two); }
.open { fill: var(--paper); stroke: var(--ink); stroke-width: 1.4; }
.solid { fill: var(--ink); }
.tick { stroke: var(--faint); stroke-width: 1.2; }
.mark { stroke: var(--two); stroke-width: 2; }
"""


class Canvas:
    """A drawing under construction.

    Args:
        width: Width of the view box.
        label: What a screen reader says.
    """

    def __init__(self, width: int, label: str) -> None:
        self.width = width
        self._label = label
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> None:
        """Write at a baseline."""
        attributes = f' class="{kind}"' if kind else ""
        if anchor != "start":
            attributes += f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{attributes}>{escape(words, quote=False)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a rectangle."""
        size = f'width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" {size}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a straight line."""
        ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
        self._parts.append(f'<line class="{kind}" {ends}/>')

    def path(self, points: Sequence[tuple[float, float]], kind: str, dash: str = "") -> None:
        """Draw an open line through points."""
        route = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<polyline class="{kind}"{dashes} points="{route}"/>')

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        """Draw a circle."""
        self._parts.append(f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>')

    def triangle(self, x: float, y: float, size: float, kind: str) -> None:
        """Draw a triangle that points up, around a point."""
        corners = ((x, y - size), (x - size, y + size), (x + size, y + size))
        route = " ".join(f"{_n(px)},{_n(py)}" for px, py in corners)
        self._parts.append(f'<polygon class="{kind}" points="{route}"/>')

    def cross(self, x: float, y: float, size: float, kind: str) -> None:
        """Draw a diagonal cross."""
        self.line(x - size, y - size, x + size, y + size, kind)
        self.line(x - size, y + size, x + size, y - size, kind)

    def render(self, height: float) -> str:
        """Return the whole document."""
        box = f'viewBox="0 0 {self.width} {_n(height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{escape(self._label)}">'
        paper = f'<rect class="paper" width="{self.width}" height="{_n(height)}"/>'
        return "\n".join([head, f"<style>{STYLE}</style>", paper, *self._parts, "</svg>"]) + "\n"


def _n(value: float) -> str:
    """A coordinate with at most one decimal."""
    text = f"{value:.1f}"
    return text.removesuffix(".0")
