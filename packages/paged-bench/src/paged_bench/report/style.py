"""Colours, patterns and line styles of all drawings and pages, light and dark.

Invariant: nothing is said by colour alone. A series has a shape and a dash of its own, a part of a bar a
pattern, a cell of a heat map its number and a bar.
"""

from __future__ import annotations

SERIES = 10  # distinct shapes and dashes; the first is ours

_LIGHT = (
    "#0b63b0",
    "#b3540a",
    "#1a7f37",
    "#8250df",
    "#bf2c6b",
    "#6b6500",
    "#0f7b7b",
    "#57606a",
    "#7a3b00",
    "#1b1f24",
)
_DARK = (
    "#58a6ff",
    "#f0883e",
    "#56d364",
    "#bc8cff",
    "#ff7eb6",
    "#d2c35a",
    "#4fd1c5",
    "#9aa4af",
    "#d9a066",
    "#e6edf3",
)
_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 3", "5 2 1 2 1 2", "3 6", "14 3 2 3")
# From good to bad, one hue; the ink of a cell is chosen for contrast.
_HEAT_LIGHT = ("#e8f1fa", "#cfe2f5", "#a9cbeb", "#7caeda", "#3f83bf", "#0b4f8c")
_HEAT_LIGHT_INK = ("#1b1f24", "#1b1f24", "#1b1f24", "#1b1f24", "#ffffff", "#ffffff")
_HEAT_DARK = ("#16222e", "#1b3349", "#1f4768", "#265f8d", "#3d86bf", "#8cc4f2")
_HEAT_DARK_INK = ("#e6edf3", "#e6edf3", "#e6edf3", "#ffffff", "#0d1117", "#0d1117")

LIGHT_PAGE = {"paper": "#ffffff", "ink": "#1b1f24", "muted": "#57606a", "grid": "#d8dee4"}
DARK_PAGE = {"paper": "#131416", "ink": "#e6edf3", "muted": "#9aa4af", "grid": "#33393f"}


def _variables(
    page: dict[str, str], series: tuple[str, ...], heat: tuple[str, ...], heat_ink: tuple[str, ...]
) -> str:
    named = dict(page)
    named |= {f"c{index}": colour for index, colour in enumerate(series)}
    named |= {f"h{index}": colour for index, colour in enumerate(heat)}
    named |= {f"i{index}": colour for index, colour in enumerate(heat_ink)}
    return ";".join(f"--{name}:{colour}" for name, colour in named.items())


VARIABLES = (
    f":root{{color-scheme:light dark;{_variables(LIGHT_PAGE, _LIGHT, _HEAT_LIGHT, _HEAT_LIGHT_INK)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{"
    f"{_variables(DARK_PAGE, _DARK, _HEAT_DARK, _HEAT_DARK_INK)}}}}}"
)


_RULES = [
    ".paper{fill:var(--paper)}.ink{fill:var(--ink)}.muted{fill:var(--muted)}",
    ".grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--muted);stroke-width:1}",
    ".roof{stroke:var(--ink);stroke-width:2;fill:none}",
    ".guide{stroke:var(--muted);stroke-width:1;stroke-dasharray:3 3;fill:none}",
    ".bar{fill:var(--ink);opacity:.55}.none{fill:none;stroke:var(--grid)}",
]
_RULES += [
    f".m{index}{{fill:var(--c{index});stroke:var(--paper);stroke-width:1}}"
    f".t{index}{{fill:var(--c{index})}}"
    f".l{index}{{stroke:var(--c{index});stroke-width:2;fill:none;stroke-dasharray:{dash}}}"
    f".p{index}{{fill:url(#p{index});stroke:var(--c{index})}}"
    for index, dash in enumerate(_DASHES)
]
_RULES += [f".h{index}{{fill:var(--h{index})}}.i{index}{{fill:var(--i{index})}}" for index in range(6)]
CSS = VARIABLES + "".join(_RULES) + ".whole{stroke-dasharray:none}"

# Parts of a bar: plain, stripes both ways, dots, lines, a grid.
_MARKS = (
    "",
    '<path d="M0 8L8 0" stroke="var(--paper)" stroke-width="2.5"/>',
    '<circle cx="4" cy="4" r="2" fill="var(--paper)"/>',
    '<path d="M0 0L8 8" stroke="var(--paper)" stroke-width="2.5"/>',
    '<path d="M0 4H8" stroke="var(--paper)" stroke-width="2.5"/>',
    '<path d="M4 0V8" stroke="var(--paper)" stroke-width="2.5"/>',
    '<path d="M0 4H8M4 0V8" stroke="var(--paper)" stroke-width="1.5"/>',
    '<path d="M0 8L8 0M0 0L8 8" stroke="var(--paper)" stroke-width="1.5"/>',
)
PATTERNS = "".join(
    f'<pattern id="p{index}" width="8" height="8" patternUnits="userSpaceOnUse">'
    f'<rect width="8" height="8" fill="var(--c{index})"/>{mark}</pattern>'
    for index, mark in enumerate(_MARKS)
)
