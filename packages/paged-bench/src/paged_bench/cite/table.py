"""A record as Markdown tables, written from the record alone so that a page cannot differ from it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from paged_bench.cite.figures import layers_of
from paged_bench.errors import RecordError
from paged_bench.plain import plain
from paged_bench.record import Case, Memory, Record, Samples, peer_name

_SERIES = (
    ("attend+combine", "attend + combine"),
    ("step", "whole step"),
    *((name, name) for name in ("layer", "append", "schedule", "attend", "combine")),
)
_SIZES = ("context", "pool")


def table(record: Record, only: str = "*") -> str:
    """Return the cases whose ids match the pattern `only`: attention cases with their floors, others plainly.

    Raises:
        RecordError: There is no such case.
    """
    cases = [case for case in record.cases if fnmatchcase(case.id, only)]
    if not cases:
        raise RecordError(only, "matches no case", "see the ids in the record")
    shaped = [case for case in cases if case.shape is not None]
    measured = [case for case in shaped if case.series]
    if measured and all(layers_of(case) > 1 for case in measured):
        return _stack_table(record, shaped)
    if shaped and not measured and any(case.peers for case in shaped):
        return _peer_table(record, shaped)
    if shaped:
        return _attention_table(record, shaped)
    if all(isinstance(case.parameters.get(key), int | float) for case in cases for key in _SIZES):
        return _growth_table(cases)
    return _plain_table(cases)


def time_text(us: float) -> str:
    """Return a time with the unit that fits, to three digits or so.

    Example:
        >>> time_text(43.8), time_text(1100.7), time_text(190132.2), time_text(1098727.4)
        ('43.8 µs', '1,100.7 µs', '190.1 ms', '1,098.7 ms')
    """
    return f"{us:,.1f} µs" if us < 2000 else f"{us / 1e3:,.1f} ms"


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Keep a text of a record inside its cell."""
    return plain(text).replace("|", "\\|")


def _attention_table(record: Record, cases: Sequence[Case]) -> str:
    series = [pair for pair in _SERIES if any(case.samples(pair[0], "graph") for case in cases)]
    names = list(dict.fromkeys(row.peer for case in cases for row in case.peers if row.series))
    times = [*(title for _, title in series), *map(peer_name, names)]
    columns = ["case", "heads", "dims", "floor µs", *(f"{name} µs" for name in times), "ratio", "error"]
    rows = []
    for case in cases:
        shape, floor, ratio = case.shape, record.floor_us(case), record.ratio_to_floor(case)
        assert shape is not None
        sizes = [case.title, str(shape.heads), f"{shape.head_size}/{shape.v_head_size}"]
        if case.failed is not None:
            rows.append([*sizes, *[""] * (len(columns) - 4), case.failed])
            continue
        peers = {row.peer: _number(_peer_median(row.series)) for row in case.peers if row.series}
        ours = [_median(case.samples(name, "graph")) for name, _ in series]
        cells = [_number(floor), *ours, *(peers.get(name, "") for name in names), _number(ratio, ".2f")]
        rows.append([*sizes, *cells, _error(case)])
    return _rows(columns, rows)


def _number(value: float | None, spec: str = ",.1f") -> str:
    return "" if value is None else f"{value:{spec}}"


def _median(samples: Samples | None) -> str:
    return _number(samples.median if samples else None)


def _error(case: Case) -> str:
    return _number(case.correctness.relative_error if case.correctness else None, ".1e")


def _stack_table(record: Record, cases: Sequence[Case]) -> str:
    titles = ("floor µs", "whole step µs", "a layer µs", "ratio", "error", "caches GB", "workspace MB")
    columns = ["case", *titles, "allocations"]
    rows = []
    for case in cases:
        step, floor, ratio = case.samples("step", "graph"), record.floor_us(case), record.ratio_to_floor(case)
        if step is None:
            rows.append([case.title, *[""] * len(titles), f"failed: {case.failed}"])
            continue
        times = [_number(step.median), _number(step.median / layers_of(case))]
        memory = case.memory or Memory()
        caches, workspace = memory.cache_bytes, memory.workspace_bytes
        sizes = [_number(caches and caches / 1e9), _number(workspace and workspace / 1e6)]
        cells = [_number(floor), *times, _number(ratio, ".2f"), _error(case), *sizes]
        rows.append([case.title, *cells, _number(memory.run_allocations, "d")])
    return _rows(columns, rows)


def _peer_table(record: Record, cases: Sequence[Case]) -> str:
    names = list(dict.fromkeys(row.peer for case in cases for row in case.peers if row.series))
    rows = []
    for case in cases:
        known = {row.peer: row for row in case.peers if row.series}
        floor = record.floor_us(case)
        best = min((_peer_median(row.series) for row in known.values()), default=None)
        times = [_number(_peer_median(known[name].series)) if name in known else "" for name in names]
        ratio = _number(best / floor if best and floor else None, ".2f")
        rows.append([case.title, _number(floor), *times, ratio])
    return _rows(["case", "floor", *map(peer_name, names), "best over floor"], rows)


def _peer_median(series: Sequence[Samples]) -> float:
    """Prefer graph replay, as for our own figures."""
    chosen = [one for one in series if one.what == "attend+combine"] or list(series)
    return min(chosen, key=lambda one: one.timing != "graph").median


def _growth_table(cases: Sequence[Case]) -> str:
    rows = []
    for case in cases:
        samples = case.samples()
        sizes = [f"{case.parameters[key]:,}" for key in _SIZES]
        rows.append([*sizes, time_text(samples.median) if samples else f"failed: {case.failed}"])
    return _rows(["context", "pages of the pool", "median"], rows)


def _plain_table(cases: Sequence[Case]) -> str:
    aims = any("aim_median_us" in case.parameters for case in cases)
    columns = ["what", "median", "quartiles", "p99", *(["aim, median / p99"] if aims else []), "samples"]
    rows = []
    for case in cases:
        samples = case.samples()
        if samples is None:
            rows.append([case.title, f"failed: {case.failed}", *[""] * (len(columns) - 2)])
            continue
        quartiles, p99 = samples.quartiles, samples.percentile(99)
        spread = " … ".join(map(time_text, quartiles)) if quartiles else ""
        cells = [case.title, time_text(samples.median), spread, time_text(p99) if p99 else ""]
        rows.append([*cells, *([_aim(case)] if aims else []), str(len(samples.values) or "none kept")])
    return _rows(columns, rows)


def _aim(case: Case) -> str:
    found = [case.parameters.get(key) for key in ("aim_median_us", "aim_p99_us")]
    return " / ".join(f"{aim:,.0f} µs" for aim in found if isinstance(aim, int | float))
