"""What a record of measurements holds: one schema for GPU and CPU runs, ours and the peers'.

Invariant: a figure that can be derived from others is not stored. Medians come from the samples, ratios from
the floor, floors from the counted work and the ceilings of the same run. The one exception is a source that
kept no samples; its median is stored as such and never enters a comparison.

Units are fixed: times are microseconds a call, rates are bytes or operations a second, sizes are bytes.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from paged_bench.record.case import Case
from paged_bench.record.machine import Ceiling, Environment
from paged_bench.record.samples import Samples
from paged_bench.record.types import Block, Sha256, Text

SCHEMA_VERSION: Final = 1


class Peer(Block):
    """An implementation that was looked for."""

    name: Text
    version: str | None = None
    notes: str | None = None
    failed: str | None = None  # why it took no part at all


class Suite(Block):
    """Which cases were meant to run; the digest is over their definitions."""

    name: Text
    digest: Sha256 | None = None


class Kernels(Block):
    """Which kernel sources ran: one digest over all, and one of each file with its includes in place."""

    digest: Sha256
    files: dict[str, Sha256] = Field(default={})


class History(Block):
    """Why the figures are not those of the present sources, and since when."""

    because: Text
    since: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]


class Revision(Block):
    """The commit that was measured; `dirty` when the tree had changes, None when that is not known."""

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,64}$")]
    dirty: bool | None = None


class Record(Block):
    """One run on one machine.

    Attributes:
        schema_version: of this schema; another one is refused, never guessed at.
        kind: `gpu` or `cpu`; only records of one kind compare.
        what: one sentence on what was measured.
        source: where the figures come from when this package did not measure them.
        created: UTC, to the second.
        command: as it was typed, without paths of the machine.
        stopped: why the run ended early; None when it is complete.
        session: a name that both sides of one interleaved run share.
        code: digests of the Python sources under test, by package.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["gpu", "cpu"]
    what: Text
    source: str | None = None
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\+00:00|Z)$")]
    command: str | None = None
    stopped: str | None = None
    session: str | None = None
    history: History | None = None
    revision: Revision | None = None
    suite: Suite
    kernels: Kernels | None = None
    code: dict[str, Sha256] = Field(default={})
    environment: Environment
    ceilings: tuple[Ceiling, ...] = ()
    peers: tuple[Peer, ...] = ()
    cases: tuple[Case, ...]

    @model_validator(mode="after")
    def _cases_are_distinct(self) -> Self:
        ids = [case.id for case in self.cases]
        if len(ids) != len(set(ids)):
            twice = sorted({one for one in ids if ids.count(one) > 1})
            raise ValueError(f"these case ids stand twice: {', '.join(twice)}")
        return self

    def case(self, case_id: str) -> Case | None:
        """Return the case of that id."""
        return next((case for case in self.cases if case.id == case_id), None)

    def ceiling(self, what: str, dtype: str | None = None) -> float | None:
        """Return a ceiling of this run; of several matmuls the one of `dtype`, else the first."""
        found = [one for one in self.ceilings if one.what == what]
        exact = [one for one in found if dtype is not None and one.dtype == dtype]
        return (exact or found)[0].value if found else None

    def floor_us(self, case: Case) -> float | None:
        """Return the larger of the time to read the bytes and to do the operations, microseconds.

        None without counted work or without the run's own ceilings. Launches are left out.
        """
        read = self.ceiling("read")
        matmul = self.ceiling("matmul", case.shape.dtype if case.shape else None)
        if case.work is None or read is None or matmul is None:
            return None
        return max(case.work.bytes / read, case.work.operations / matmul) * 1e6 or None

    def ratio_to_floor(self, case: Case, samples: Samples | None = None) -> float | None:
        """Return median over floor, of the case's main series unless another is given."""
        floor, samples = self.floor_us(case), samples or case.samples()
        return samples.median / floor if floor and samples else None
