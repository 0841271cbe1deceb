"""Write what pages cite of the records: the README's table, and every table between marks.

usage: python tools/measured.py [--check]

A page asks for a table by the comment `<!-- record: NAME.json PATTERN -->` and ends it by
`<!-- end of record -->`. Between them stands what `paged-bench record table` prints. With --check nothing is
written, and pages that differ are named.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paged_bench.cite.table import table, time_text
from paged_bench.record import Case, Record, load

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "measurements"
# What the compiler says of the kernels; it has a format and a test of its own.
NO_RECORDS = {"kernel-resources.json"}
BLOCK = re.compile(
    r"(?P<mark><!-- record: (?P<name>[\w.-]+) ?(?P<only>\S*) -->\n).*?(?P<end><!-- end of record -->)",
    re.DOTALL,
)
README_BLOCK = re.compile(r"(?P<mark><!-- figures: begin -->\n).*?(?P<end><!-- figures: end -->)", re.DOTALL)
ATTENTION = "latent/576-512/bf16/h16/p64/decode/"


@dataclass(frozen=True)
class Row:
    """One row of the README's table: what it says, and the ids it may come from, the best first."""

    what: str
    ids: tuple[str, ...]
    p99: bool = False


def _attention(what: str, sizes: str) -> Row:
    return Row(f"{what}, attend + combine", (ATTENTION + sizes, f"{ATTENTION}{sizes}/norope"))


README_ROWS = (
    _attention("LATENT 576/512, 16 heads, bfloat16: 1 sequence of 4,096", "b1/c4096"),
    _attention("1 sequence of 131,072", "b1/c131072"),
    _attention("128 sequences of 4,096", "b128/c4096"),
    _attention("128 sequences of 8,192", "b128/c8192"),
    Row(
        "page authority: a decode step of 1,024 sequences × 32,768 tokens, planned and committed",  # noqa: RUF001
        ("kv/decode-step",),
        p99=True,
    ),
    Row("schema: `check` of a full LATENT node", ("schema/check-latent",)),
    Row(
        "oracle: decode of 32 sequences of 4,096, 16 heads, 576/512",
        ("oracle/decode-32-sequences-of-4096/bfloat16",),
    ),
)


def records() -> dict[str, Record]:
    """Return every record that pages may cite, by file name."""
    found = sorted(path for path in RECORDS.glob("*.json") if path.name not in NO_RECORDS)
    return {path.name: load(path) for path in found}


def pages() -> list[Path]:
    """Return every page that may hold figures."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "packages").glob("*/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def written(text: str, found: dict[str, Record]) -> str:
    """Return a page with its tables as the records have them."""

    def from_record(match: re.Match[str]) -> str:
        if match["name"] not in found:
            raise LookupError(f"a page asks for {match['name']}, which is not in docs/measurements")
        return f"{match['mark']}{table(found[match['name']], match['only'] or '*')}\n{match['end']}"

    text = README_BLOCK.sub(lambda match: f"{match['mark']}{readme_table(found)}\n{match['end']}", text)
    return BLOCK.sub(from_record, text)


def readme_table(found: dict[str, Record]) -> str:
    """Return the README's table, each row from the newest record.

    From history only if need be, and from a run that was told which path to take likewise.
    """
    lines = ["| what | figure | machine |", "|---|---|---|"]
    for row in README_ROWS:
        record, case = _newest(row.ids, found)
        samples = case.samples()
        assert samples is not None
        ratio, p99 = record.ratio_to_floor(case), samples.percentile(99)
        figure = time_text(samples.median)
        figure += f", {ratio:.2f} times the floor" if ratio else ""
        figure += f" (p99 {time_text(p99)})" if row.p99 and p99 else ""
        lines.append(f"| {row.what} | {figure} | {_machine(record)} |")
    return "\n".join(lines)


def _newest(ids: Sequence[str], found: dict[str, Record]) -> tuple[Record, Case]:
    candidates = [
        (record.history is None, _as_it_comes(record), -place, record.created, record, case)
        for record in found.values()
        for place, name in enumerate(ids)
        if (case := record.case(name)) is not None and case.samples() is not None
    ]
    if not candidates:
        raise SystemExit(f"no record has {ids[0]}")
    *_, record, case = max(candidates, key=lambda one: one[:4])
    return record, case


def _as_it_comes(record: Record) -> bool:
    return "--kernel" not in (record.command or "").split()


def _machine(record: Record) -> str:
    environment = record.environment
    name = environment.gpu.name if environment.gpu else f"{environment.cores} cores of an {environment.cpu}"
    return f"{name} (history)" if record.history else name


def main(arguments: Sequence[str]) -> int:
    """Write or check all pages."""
    found, stale = records(), []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        wanted = written(text, found)
        if wanted != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in arguments:
                path.write_text(wanted, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'differs from its records' if '--check' in arguments else 'written'}")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
