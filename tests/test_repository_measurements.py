"""Every figure in the pages is one that a record backs, and records are of the present kernels or history."""

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from paged_bench.cite.figures import Figure, figures
from paged_bench.record import Record, load, stale_kernels

ROOT = Path(__file__).resolve().parent.parent


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measured", ROOT / "tools" / "measured.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MEASURED = tool()
RECORDS: dict[str, Record] = MEASURED.records()
PAGES: list[Path] = MEASURED.pages()
IDS = [str(path.relative_to(ROOT)) for path in PAGES]

# What looks like a measurement and is none: predictions, constants of a method, rounded descriptions.
NOT_MEASURED = {
    "docs/measurements/h200-latent-split.md": {"3 µs", "1.2 µs"},
    "docs/measuring.md": {"250 µs", "10 µs", "0.2 s", "0.1 s"},
}
UNITS: dict[str, tuple[str, float]] = {
    "ns": ("time", 1e-3), "µs": ("time", 1.0), "us": ("time", 1.0), "ms": ("time", 1e3), "s": ("time", 1e6),
    "GB/s": ("rate", 1e9), "TB/s": ("rate", 1e12), "TFLOP/s": ("operations", 1e12),
    "times": ("ratio", 1.0), "of the floor": ("ratio", 1.0),
}  # fmt: skip
NUMBER = r"\d[\d,]*(?:\.\d+)?"
QUANTITY = re.compile(
    rf"(?<![\w.,/-])(?:(?P<first>{NUMBER}) (?:to|against|and) )?(?P<second>{NUMBER}) ?"
    r"(?P<unit>ns|µs|us|ms|s|GB/s|TB/s|TFLOP/s|times|of the floor)(?![\w/])"
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"<!-- (record: \S+|figures: begin).*?<!-- (end of record|figures: end) -->", re.DOTALL)
OTHER_RECORDS = ("tests-gpu/parity-record.json",)


@dataclass(frozen=True)
class Quantity:
    """A figure of a page: as it is written, and what it means."""

    text: str
    kind: str
    value: float
    step: float


def quantities(text: str) -> Iterator[Quantity]:
    """Return the figures with a unit in the prose and the hand-written tables of a page."""
    prose = " ".join(re.sub(r"<!--.*?-->", "", WRITTEN.sub("", FENCE.sub("", text)), flags=re.DOTALL).split())
    for match in QUANTITY.finditer(prose):
        kind, scale = UNITS[match["unit"]]
        for number in (match["first"], match["second"]):
            if number is None or (match["unit"] == "times" and "." not in number):
                continue  # "three times" and "2 times" count; "2.6 times" measures
            decimals = len(number.partition(".")[2])
            value = float(number.replace(",", ""))
            yield Quantity(f"{number} {match['unit']}", kind, value * scale, scale * 10**-decimals)


def backing(text: str) -> list[Figure]:
    """Return the figures of the records that a page names, or of all but history where it names none."""
    named = [record for name, record in RECORDS.items() if name in text]
    named = named or [record for record in RECORDS.values() if record.history is None]
    found = [figure for record in named for figure in figures(record)]
    for name in OTHER_RECORDS:
        if name in text:
            values = numbers(json.loads((ROOT / name).read_text(encoding="utf-8")))
            # Its units are in its keys: seconds, milliseconds and microseconds are all taken as they may be.
            found += [Figure("time", value * scale, name) for value in values for scale in (1.0, 1e3, 1e6)]
    return found


def numbers(content: object) -> Iterator[float]:
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from numbers(value)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield float(content)


def unbacked(page: str, text: str) -> set[str]:
    """Return the figures of a page that no record has, to the digits that the page gives."""
    known = backing(text)
    return {
        one.text
        for one in quantities(text)
        if one.text not in NOT_MEASURED.get(page, set())
        and not any(
            figure.kind == one.kind and abs(figure.value - one.value) <= one.step * 0.5000001
            for figure in known
        )
    }


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_of_the_present_kernels_or_history(name: str) -> None:
    record = RECORDS[name]
    changed = stale_kernels(record)
    assert record.history is not None or not changed, (
        f"{name} was measured with other sources of {', '.join(changed)}. Measure anew, or mark it:"
        f' paged-bench record history docs/measurements/{name} --because "..."'
    )


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_a_gpu_names_its_kernels_and_is_complete(name: str) -> None:
    record = RECORDS[name]
    if record.stopped is not None:
        # A run that was ended early, by a signal that it saw or that it did not see: no case without samples
        # but those that failed, and the pages say so.
        assert record.stopped in {"interrupted", "still running"} or record.history is not None
        for case in record.cases:
            samples = case.samples()
            assert case.failed is not None or (samples is not None and len(samples.values) >= 5), case.id
        citing = [text for path in PAGES if name in (text := path.read_text(encoding="utf-8"))]
        assert citing
        assert all("ended by" in " ".join(text.split()) for text in citing), "the pages say that it was ended"
    runs_kernels = any(case.shape or case.variants for case in record.cases)
    assert not runs_kernels or record.kernels is not None or record.history is not None


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_the_tables_are_those_of_the_records(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert MEASURED.written(text, RECORDS) == text, "run python tools/measured.py"


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_figure_is_in_a_record(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert unbacked(path.relative_to(ROOT).as_posix(), text) == set()


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_a_page_that_cites_history_says_so(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    cited = {name for name, record in RECORDS.items() if name in text and record.history is not None}
    assert not cited or "history" in re.sub(r"[\w.-]+\.json", "", text)


def test_the_check_sees_a_figure_that_no_record_has() -> None:
    name = "h200-latent-split.json"
    case = RECORDS[name].cases[0]
    samples = case.samples()
    assert samples is not None
    us, ratio = samples.median, RECORDS[name].ratio_to_floor(case)
    good = f"From {name}: {us:.1f} µs, that is {us / 1000:.4f} ms, {ratio:.2f} times the floor."
    assert unbacked("page", good) == set()
    wrong = f"From {name}: 7.77 µs, 5.43 to 123,456.7 us, 99.9 TB/s, 0.123 of the floor.\n```\n1.11 µs\n```\n"
    expected = {"7.77 µs", "5.43 us", "123,456.7 us", "99.9 TB/s", "0.123 of the floor"}
    assert unbacked("page", wrong) == expected


def test_a_page_that_names_no_record_cannot_lean_on_history() -> None:
    ratios: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for name, record in RECORDS.items():
        for figure in figures(record):
            if figure.kind == "ratio":
                ratios[record.history is not None][f"{figure.value:.2f} times"] = name
    only_past = max(ratios[True].keys() - ratios[False].keys())
    assert unbacked("page", f"It took {only_past} the floor.") == {only_past}
    assert unbacked("page", f"It took {only_past} the floor, as {ratios[True][only_past]} has it.") == set()


def test_the_readme_is_of_the_operator_as_it_chooses() -> None:
    record, _ = MEASURED._newest((f"{MEASURED.ATTENTION}b128/c4096",), RECORDS)
    assert "--kernel" not in record.command


def test_the_check_sees_an_edited_table() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    edited = re.sub(r"(\d)(\.\d) µs", lambda found: f"{(int(found[1]) + 1) % 10}{found[2]} µs", page, count=1)
    assert edited != page
    assert MEASURED.written(edited, RECORDS) == page


def test_an_edited_record_is_not_read(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "measurements" / "cpu.json").read_text(encoding="utf-8")
    digits = re.search(r'"values": \[(\d)', text)
    assert digits is not None
    other = str((int(digits[1]) + 1) % 10)
    (tmp_path / "cpu.json").write_text(
        text[: digits.start(1)] + other + text[digits.end(1) :], encoding="utf-8"
    )
    with pytest.raises(ValueError, match="edited"):
        load(tmp_path / "cpu.json")
