"""Points for the drawings, from any number of records: ours and the peers' on the same footing.

Invariant: a point is held against the ceilings of its own run, never against another machine's. Of our own
figures those of the present kernels are taken where there are any; figures from history are named so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paged_bench.record import STEP_KERNELS, Case, Record, Samples, Shape, Work, peer_name
from paged_bench.record.names import PEER_NAMES
from paged_bench.report.style import SERIES

OURS = "paged-cuda"
_KNOWN = (OURS, *PEER_NAMES.values())


@dataclass(frozen=True)
class Point:
    """One implementation on one shape.

    Attributes:
        implementation: `OURS` or the peer's name.
        case: where it comes from.
        shape: of the case.
        us: median under graph replay, microseconds.
        floor_us: what the same run's ceilings allow; None without ceilings.
        history: whether the record is marked as history.
    """

    implementation: str
    case: Case
    shape: Shape
    us: float
    floor_us: float | None
    history: bool

    @property
    def work(self) -> Work | None:
        """The counted work of the case."""
        return self.case.work

    @property
    def standard(self) -> bool:
        """Whether the operator ran as it comes: no option of its own was set."""
        given = self.case.parameters
        # Two terms were the default of the kernels that are history now.
        usual = {None, 2} if self.history else {None}
        fixed = given.get("split_rows") or given.get("row_tile")
        return not fixed and given.get("weight_terms") in usual

    @property
    def ratio(self) -> float | None:
        """Median over floor."""
        return self.us / self.floor_us if self.floor_us else None


def points(records: Sequence[Record]) -> tuple[Point, ...]:
    """Return every point with a shape, ours first and of them the newest.

    A peer that was timed beside the present kernels is not drawn from history as well. Stacks of a whole
    model are left out: their times are those of many layers.
    """
    found = [point for record in present(records) for point in _ours(record)]
    peers = [point for record in records for point in _peers(record)]
    fresh = {point.implementation for point in peers if not point.history}
    found += [point for point in peers if not (point.history and point.implementation in fresh)]
    return tuple(point for point in found if point.case.group != "model")


def present(records: Sequence[Record]) -> list[Record]:
    """Return the records of our own present kernels, or those of history where there are no others.

    The newest comes first, since the first that has a size is drawn. A run that was told which path to take
    is left out where another one let the operator choose.
    """
    ours = [record for record in records if any(case.samples() and case.shape for case in record.cases)]
    ours.sort(key=lambda record: record.created[:19], reverse=True)
    fresh = [record for record in ours if record.history is None] or ours
    return [record for record in fresh if "--kernel" not in (record.command or "").split()] or fresh


def _ours(record: Record) -> Iterable[Point]:
    for case in record.cases:
        samples = _replayed(case.series)
        if samples is not None and case.shape is not None:
            yield _point(OURS, record, case, case.shape, samples)


def _peers(record: Record) -> Iterable[Point]:
    for case in record.cases:
        for row in case.peers:
            samples = _replayed(row.series)
            if samples is not None and case.shape is not None:
                yield _point(_family(peer_name(row.peer)), record, case, case.shape, samples)


def _family(name: str) -> str:
    """Return a peer's name without the backend that it chose for a case: it is one implementation.

    Example:
        >>> _family("torch SDPA (cudnn)"), _family("FA3 (vLLM)"), _family("a stranger (v2)")
        ('torch SDPA', 'FA3 (vLLM)', 'a stranger (v2)')
    """
    return next((known for known in PEER_NAMES.values() if name.startswith(f"{known} (")), name)


def _replayed(series: Sequence[Samples]) -> Samples | None:
    """Prefer graph replay of attend and combine; a case timed in eager calls only is better than none."""
    for timing in ("graph", "eager"):
        for one in series:
            if one.what == "attend+combine" and one.timing == timing:
                return one
    return None


def _point(name: str, record: Record, case: Case, shape: Shape, samples: Samples) -> Point:
    floor = record.floor_us(case)
    return Point(name, case, shape, samples.median, floor, record.history is not None)


def implementations(found: Iterable[Point]) -> list[str]:
    """Return the names: ours, those that are known, then the others as they appear."""
    names = dict.fromkeys(point.implementation for point in found)
    return sorted(names, key=lambda name: _KNOWN.index(name) if name in _KNOWN else len(_KNOWN))


def styles(names: Sequence[str]) -> dict[str, int]:
    """Return the series of each name. A known implementation looks the same in every picture.

    Example:
        >>> styles(["paged-cuda", "ONNX Runtime", "a stranger"])
        {'paged-cuda': 0, 'ONNX Runtime': 9, 'a stranger': 1}
    """
    strangers = [name for name in names if name not in _KNOWN]
    taken = {_KNOWN.index(name) for name in names if name in _KNOWN}
    free = [index for index in range(1, SERIES) if index not in taken] or list(range(1, SERIES))
    fresh = {name: free[place % len(free)] for place, name in enumerate(strangers)}
    return {name: fresh[name] if name in fresh else _KNOWN.index(name) for name in names}


@dataclass(frozen=True)
class Split:
    """The kernels of one step: names and microseconds, in launch order."""

    case: Case
    parts: tuple[tuple[str, float], ...]

    @property
    def step_us(self) -> float | None:
        """Median of the whole step, microseconds."""
        samples = self.case.samples("step", "graph")
        return samples.median if samples else None


def splits(records: Sequence[Record]) -> tuple[Split, ...]:
    """Return the cases whose step was timed, cut as finely as their samples allow.

    Where the kernels were timed apart, those are the parts. Else it is attend + combine, and the rest of the
    step. Kernels timed apart overlap less than in a step, so they need not add up to it.
    """
    cases = (case for record in present(records) for case in record.cases)
    return tuple(Split(case, parts) for case in cases if (parts := _parts(case)))


def _parts(case: Case) -> tuple[tuple[str, float], ...]:
    for names in (STEP_KERNELS, ("append", "schedule", "attend+combine")):
        apart = [(name, case.samples(name, "graph")) for name in names]
        known = tuple((name.replace("+", " + "), samples.median) for name, samples in apart if samples)
        if len(known) == len(names):
            return known
    step, attention = case.samples("step", "graph"), case.samples("attend+combine", "graph")
    if step is None or attention is None or step.median <= attention.median:
        return ()
    return (("append + schedule", step.median - attention.median), ("attend + combine", attention.median))
