"""Two records matched case by case: one model from which every output is written."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from paged_bench.compare.differences import Difference, differences
from paged_bench.compare.verdict import Pair, Row, Verdict, row
from paged_bench.errors import ComparisonError
from paged_bench.record import Case, Record


@dataclass(frozen=True)
class Unmatched:
    """A case, or a series of one, that only one side measured.

    Attributes:
        timing: of the series; empty for a whole case.
        state: `new`, `removed`, `fails now`, `failed before` or `fails in both`.
        why: the reason of a failure.
    """

    case_id: str
    title: str
    what: str
    timing: str
    state: str
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """The whole answer.

    Attributes:
        base: the record to compare with.
        head: the record that is judged.
        rows: every series that both sides measured, worst first.
        unmatched: the rest; nothing is dropped silently.
        differences: what differs between the machines; not empty only when forced.
        noise: what the same code showed within the runs, as a share (median over all series).
        drift: median ratio of the peers that both sides timed at one version; None without any. Their code
            is the same on both sides, so this is the machine.
    """

    base: Record
    head: Record
    rows: tuple[Row, ...]
    unmatched: tuple[Unmatched, ...]
    differences: tuple[Difference, ...]
    noise: float
    drift: float | None

    def count(self, *verdicts: Verdict) -> int:
        """Return how many rows have one of these verdicts."""
        return sum(row.verdict in verdicts for row in self.rows)

    @property
    def broken(self) -> tuple[Unmatched, ...]:
        """Cases that worked and fail now."""
        return tuple(one for one in self.unmatched if one.state == "fails now")


def compare(base: Record, head: Record, *, force: bool = False) -> Comparison:
    """Compare two records.

    Raises:
        ComparisonError: They are of different kinds or machines and `force` was not given, or have nothing in
            common.
    """
    found = differences(base, head)
    if found and not force:
        shown = ", ".join(f"{one.key} ({one.base} and {one.head})" for one in found)
        raise ComparisonError("records", f"differ in {shown}", "measure both on one machine, or use --force")
    if not {case.id for case in base.cases} & {case.id for case in head.cases}:
        raise ComparisonError("records", "have no case in common", "give records of one suite")
    pairs, unmatched = _match(base, head)
    if not pairs and not unmatched:
        raise ComparisonError("records", "hold samples of peers alone", "give records of this project's code")
    noise = statistics.median([pair.noise for pair in pairs if pair.noise is not None] or [0.0])
    rows = [row(pair, noise) for pair in pairs]
    order = {verdict: place for place, verdict in enumerate(Verdict)}
    rows.sort(key=lambda row: (order[row.verdict], -row.change, row.case_id, row.what))
    return Comparison(base, head, tuple(rows), tuple(unmatched), found, noise, _drift(base, head))


def _match(base: Record, head: Record) -> tuple[list[Pair], list[Unmatched]]:
    interleaved = base.session is not None and base.session == head.session
    one_process = base.kind == "gpu" and not interleaved
    pairs: list[Pair] = []
    unmatched: list[Unmatched] = []
    for case in base.cases:
        other = head.case(case.id)
        if other is None:
            unmatched.append(Unmatched(case.id, case.title, "", "", "removed"))
        elif case.failed or other.failed:
            unmatched.append(_failure(case, other))
        else:
            found, alone = _match_series(case, other, interleaved, one_process)
            pairs += found
            unmatched += alone
    known = {case.id for case in base.cases}
    new = (case for case in head.cases if case.id not in known)
    unmatched += [Unmatched(case.id, case.title, "", "", "new", case.failed or "") for case in new]
    return pairs, unmatched


def _failure(before: Case, after: Case) -> Unmatched:
    states = {(True, True): "fails in both", (False, True): "fails now", (True, False): "failed before"}
    state = states[bool(before.failed), bool(after.failed)]
    return Unmatched(before.id, before.title, "", "", state, after.failed or before.failed or "")


def _match_series(
    case: Case, other: Case, interleaved: bool, one_process: bool
) -> tuple[list[Pair], list[Unmatched]]:
    before = {(one.what, one.timing): one for one in case.series}
    after = {(one.what, one.timing): one for one in other.series}
    both = [key for key in before if key in after]
    removed = [Unmatched(case.id, case.title, *key, "removed") for key in before if key not in after]
    new = [Unmatched(case.id, other.title, *key, "new") for key in after if key not in before]
    pairs = [Pair(case.id, other.title, before[key], after[key], interleaved, one_process) for key in both]
    return pairs, removed + new


def _drift(base: Record, head: Record) -> float | None:
    versions = {peer.name: peer.version for peer in base.peers}
    same = [peer.name for peer in head.peers if peer.version and versions.get(peer.name) == peer.version]
    ratios = []
    for case in base.cases:
        other = head.case(case.id)
        after = {one.peer: one for one in other.peers} if other else {}
        for peer in case.peers:
            # A row may add the backend that was chosen to the peer's name.
            known = any(peer.peer == name or peer.peer.startswith(f"{name} (") for name in same)
            if known and peer.series and peer.peer in after:
                times = {(one.what, one.timing): one.median for one in after[peer.peer].series}
                first = peer.series[0]
                if (first.what, first.timing) in times:
                    ratios.append(times[first.what, first.timing] / first.median)
    return statistics.median(ratios) if ratios else None
