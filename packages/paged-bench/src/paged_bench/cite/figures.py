"""Every figure that a record backs, so that a page's prose can be held against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paged_bench.record import Case, Record, Samples

Kind = Literal["time", "rate", "operations", "ratio"]


@dataclass(frozen=True)
class Figure:
    """One number: microseconds, bytes a second, operations a second, or times the floor."""

    kind: Kind
    value: float
    source: str


def figures(record: Record) -> Iterator[Figure]:
    """Return medians and their spread, what a layer takes, differences within a step, floors and rates."""
    for ceiling in record.ceilings:
        kinds: dict[str, Kind] = {"matmul": "operations", "launch": "time"}
        yield Figure(kinds.get(ceiling.what, "rate"), ceiling.value, ceiling.what)
    for case in record.cases:
        floor = record.floor_us(case)
        if floor is not None:
            yield Figure("time", floor, f"{case.id} floor")
        rows = [case.series, *(row.series for row in case.peers)]
        for series in rows:
            yield from _of_series(case, series, floor)
        for key, value in case.parameters.items():
            if key.endswith("_us") and isinstance(value, int | float):
                yield Figure("time", value, f"{case.id} {key}")


def layers_of(case: Case) -> int:
    """Return the layers of a whole stack, else 1."""
    layers = case.parameters.get("layers")
    return layers if isinstance(layers, int) else 1


def _of_series(case: Case, series: Sequence[Samples], floor: float | None) -> Iterator[Figure]:
    for one in series:
        name = f"{case.id} {one.what}"
        yield Figure("time", one.median, name)
        if layers_of(case) > 1:
            yield Figure("time", one.median / layers_of(case), f"{name} a layer")
        if one.values:
            yield from (Figure("time", value, name) for value in _spread(one))
        if floor is not None:
            yield Figure("ratio", one.median / floor, name)
        if case.work is not None:
            yield Figure("rate", case.work.bytes / one.median * 1e6, name)
            yield Figure("operations", case.work.operations / one.median * 1e6, name)
    for first in series:
        for second in series:
            if first.timing == second.timing and first.median > second.median:
                yield Figure("time", first.median - second.median, f"{case.id} {first.what} - {second.what}")


def _spread(samples: Samples) -> Iterator[float]:
    yield from (min(samples.values), max(samples.values))
    yield from samples.quartiles or ()
    if samples.quartiles:
        yield samples.quartiles[1] - samples.quartiles[0]
    p99 = samples.percentile(99)
    if p99 is not None:
        yield p99
