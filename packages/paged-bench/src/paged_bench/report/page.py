"""A page that stands alone: no script, no network, light and dark, from 360 pixels of width up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from paged_bench.report.style import CSS, PATTERNS
from paged_bench.report.svg import escape

Column: TypeAlias = Literal["figure", "figure long", "long", "whole"]

_LAYOUT = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:66rem;padding:1rem;font:16px/1.5 system-ui,sans-serif;
 background:var(--paper);color:var(--ink)}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .5rem}
p,li{max-width:46rem}a{color:var(--c0)}.quiet{color:var(--muted);font-size:.875rem}
code{font-size:.9em;overflow-wrap:anywhere}
figure{margin:1rem 0}figure svg{display:block;max-width:100%;height:auto}
figcaption{color:var(--muted);font-size:.875rem;max-width:46rem}
.narrow{display:none!important}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--muted);padding:.25rem 0}
th,td{text-align:left;padding:.35rem .6rem .35rem 0;border-bottom:1px solid var(--grid);vertical-align:middle}
td.figure,th.figure{text-align:right;white-space:nowrap}
td svg{display:block;flex:none}
tr.loud td{font-weight:600}
@media(max-width:719px){
.wide{display:none!important}.narrow{display:block!important}
table.stacked thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
table.stacked tr{display:grid;grid-template-columns:1fr 1fr;column-gap:1.5rem;padding:.5rem 0;
 border-bottom:1px solid var(--grid)}
table.stacked td,table.stacked td.figure{display:flex;gap:.75rem;justify-content:space-between;
 align-items:center;border:0;padding:.1rem 0;text-align:right;white-space:normal}
table.stacked td.long,table.stacked td.whole{grid-column:1/-1}
table.stacked td.whole{text-align:left;justify-content:flex-start}
table.stacked td::before{content:attr(data-name);color:var(--muted);font-weight:400;text-align:left}
table.stacked td.whole::before{content:none}
table.stacked td:empty{display:none}
}
"""


def document(title: str, body: str) -> str:
    """Return a whole page around `body`, which holds trusted markup."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}{_LAYOUT}</style>\n</head>\n<body>\n"
        # Once for every drawing of the page.
        '<svg width="0" height="0" style="position:absolute" aria-hidden="true">'
        f"<defs>{PATTERNS}</defs></svg>\n"
        f"{body}\n</body>\n</html>\n"
    )


def table(
    columns: Sequence[tuple[str, Column]],
    rows: Sequence[tuple[bool, Sequence[str]]],
    caption: str,
) -> str:
    """Return a table that becomes a list of cards where the screen is narrow.

    Args:
        columns: name and kind: a `figure` is set right, `long` takes a card's full width, and `whole` does so
            without its name.
        rows: whether the row is to stand out, and its cells as trusted markup.
        caption: what the table holds.
    """
    classes = [f' class="{kind}"' for _, kind in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for (name, _), kind in zip(columns, classes, strict=True)
    )
    lines = []
    for loud, cells in rows:
        named = zip(cells, columns, classes, strict=True)
        shown = "".join(
            f'<td{kind} data-name="{escape(name)}">{cell}</td>' for cell, (name, _), kind in named
        )
        lines.append(f'<tr class="loud">{shown}</tr>' if loud else f"<tr>{shown}</tr>")
    return (
        f'<table class="stacked"><caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody></table>"
    )


def figure(wide: str, narrow: str, caption: str) -> str:
    """Return a drawing in two widths, of which the screen chooses one."""
    return (
        f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
