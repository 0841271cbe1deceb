"""The comparison as Markdown for a pull request."""

from __future__ import annotations

import re

from paged_bench.compare.comparison import Comparison
from paged_bench.compare.limits import limits
from paged_bench.compare.verdict import Verdict
from paged_bench.compare.words import (
    change_text,
    headline,
    interval_text,
    machine_lines,
    name_text,
    side_text,
    time_text,
)
from paged_bench.plain import plain

LEGEND = (
    "⚠️ from 15 % slower, 🔴 from 30 % slower, 🟢 from 15 % faster; each only where the 95 % interval of the "
    "ratio lies beyond what the same code showed within the runs. ❔ cannot be told."
)

_LONGEST = 65_000  # characters; GitHub takes 65,536 in a comment


def markdown(comparison: Comparison) -> str:
    """Return the comparison: flagged rows open, the rest folded, or left out where GitHub would refuse it."""
    text = _text(comparison, folded=True)
    return text if len(text) <= _LONGEST else _text(comparison, folded=False)


def _text(comparison: Comparison, *, folded: bool) -> str:
    lines = [f"## {_title(comparison)}", "", headline(comparison), ""]
    lines += [f"{side}: {side_text(comparison, side)}  " for side in ("base", "head")]
    if comparison.differences:
        keys = ", ".join(f"{one.key} ({one.base} / {one.head})" for one in comparison.differences)
        lines += ["", f"**The records differ in {_plain(keys)}; compared all the same, as asked.**"]
    quiet = {Verdict.SAME, Verdict.UNCLEAR}
    loud = [row for row in comparison.rows if row.verdict not in quiet]
    lines += ["", *_table(comparison, {row.verdict for row in loud})] if loud else []
    rest = len(comparison.rows) - len(loud)
    if rest and not folded:
        lines += ["", f"{rest} rows without a flag are left out: a comment holds no more."]
    elif rest:
        lines += [
            "",
            f"<details><summary>{rest} rows without a flag</summary>",
            "",
            *_table(comparison, quiet),
        ]
        lines += ["", "</details>"]
    if comparison.unmatched:
        lines += ["", "| state | case | why |", "|---|---|---|"]
        lines += [
            f"| {one.state} | {_plain(name_text(one))} | {_plain(one.why)} |" for one in comparison.unmatched
        ]
    lines += ["", LEGEND, "", "**What this cannot see**", ""]
    lines += [f"- {_plain(sentence)}" for sentence in limits(comparison)]
    lines += ["", "<details><summary>Machine</summary>", ""]
    lines += [f"- {name}: {_plain(value)}" for name, value in machine_lines(comparison)]
    return "\n".join([*lines, "", "</details>", ""])


def _title(comparison: Comparison) -> str:
    if comparison.broken or comparison.count(Verdict.MUCH_SLOWER):
        return "🔴 Slower than the base"
    if comparison.count(Verdict.SLOWER):
        return "⚠️ Somewhat slower than the base"
    if not comparison.rows:
        return "❔ Nothing could be compared"
    return "✅ No slowdown found"


def _table(comparison: Comparison, verdicts: set[Verdict]) -> list[str]:
    lines = [
        "| | case | base | head | change | 95 % interval | noise |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in comparison.rows:
        if row.verdict in verdicts:
            figures = (time_text(row.base_us), time_text(row.head_us), change_text(row), interval_text(row))
            cells = (row.verdict.flag, _plain(name_text(row)), *figures, f"{row.noise:.1%}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _plain(text: str) -> str:
    """Keep a text from a record from being read as markup."""
    escaped = re.sub(r"[\\|\[\]]", r"\\\g<0>", plain(" ".join(text.split())))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;")
    return escaped.replace("@", "@\u200b")  # a name in a record must not notify anybody
