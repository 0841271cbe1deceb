"""The record of a run in progress: a valid file from before the first case on, whatever ends the run.

Invariant: the file is replaced after every case and never edited. Until the end it says that it is not
complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from paged_bench.measure.suite import CaseSpec, digest
from paged_bench.measure.timing import joined
from paged_bench.record import (
    Case,
    Ceiling,
    Environment,
    Gpu,
    Peer,
    PeerRow,
    Record,
    Samples,
    Suite,
    finish,
    package_digest,
    present_kernels,
    revision,
    save,
)

_ROOT = Path(__file__).resolve().parents[5]  # of the tree, if this is not an installed wheel
_CODE = ("paged_cuda", "paged_oracle", "paged_bench")


class Recorder:
    """Collects what a run measures and keeps it in a file.

    Args:
        path: The file.
        suite: Name of the suite.
        specs: Its cases.
        command: As it was typed.
        environment: The machine at the start.
    """

    def __init__(
        self, path: Path, suite: str, specs: Sequence[CaseSpec], command: str, environment: Environment
    ) -> None:
        self._path = path
        self._cases: dict[str, Case] = {}
        self._record = Record(
            kind="gpu",
            what=f"The LATENT operator of paged-cuda, suite {suite}, checked against the oracle",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            stopped="still running",
            revision=revision(_ROOT) if (_ROOT / "packages" / "paged-bench").is_dir() else None,
            suite=Suite(name=suite, digest=digest(specs)),
            kernels=present_kernels(),
            code={package: package_digest(package) for package in _CODE},
            environment=environment,
            cases=(),
        )
        self.write()

    @property
    def record(self) -> Record:
        """The record as it stands."""
        return self._record

    def write(self) -> None:
        """Replace the file.

        Raises:
            OSError: It cannot be written.
        """
        self._record = self._record.model_copy(update={"cases": tuple(self._cases.values())})
        save(self._record, self._path)

    def ceilings(self, ceilings: tuple[Ceiling, ...]) -> None:
        """Note the ceilings."""
        self._record = self._record.model_copy(update={"ceilings": ceilings})
        self.write()

    def peers(self, peers: Iterable[Peer]) -> None:
        """Note who was looked for."""
        self._record = self._record.model_copy(update={"peers": tuple(peers)})
        self.write()

    def add(self, case: Case) -> None:
        """Note a case; samples of a case that is there already become further blocks of its series."""
        there = self._cases.get(case.id)
        self._cases[case.id] = case if there is None else merged(there, case)
        self.write()

    def finish(self, stopped: str | None, gpu: Gpu | None) -> Record:
        """Note how the run ended and the machine's state, and return the record."""
        environment = finish(self._record.environment, gpu)
        self._record = self._record.model_copy(update={"stopped": stopped, "environment": environment})
        self.write()
        return self._record


def merged(there: Case, later: Case) -> Case:
    """Return a case with the samples of two rounds; what failed later takes the case's figures away."""
    if there.failed is not None:
        return there
    if later.failed is not None:
        return later
    peers = {row.peer: row for row in there.peers}
    for row in later.peers:
        old = peers.get(row.peer)
        peers[row.peer] = row if old is None or old.failed or row.failed else _merged_row(old, row)
    return there.model_copy(
        update={"series": _merged_series(there.series, later.series), "peers": tuple(peers.values())}
    )


def _merged_row(there: PeerRow, later: PeerRow) -> PeerRow:
    return there.model_copy(update={"series": _merged_series(there.series, later.series)})


def _merged_series(there: Sequence[Samples], later: Sequence[Samples]) -> tuple[Samples, ...]:
    found = {(one.what, one.timing): one for one in there}
    for one in later:
        key = (one.what, one.timing)
        found[key] = joined(found[key], one) if key in found else one
    return tuple(found.values())


def failed_case(spec: CaseSpec, reason: str) -> Case:
    """Return the row of a case without figures."""
    return Case(
        id=spec.id, title=spec.label, group=spec.group, shape=spec.shape, work=spec.work, failed=reason
    )
