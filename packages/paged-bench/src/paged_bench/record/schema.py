"""What a record of measurements holds: one schema for GPU and CPU runs, ours and the peers'.

Invariant: a figure that can be derived from others is not stored. Medians come from the samples, ratios from
the floor, floors from the counted work and the ceilings of the same run. The one exception is a source that
kept no samples; its median is stored as such and never enters a comparison.

Units are fixed: times are microseconds a call, rates are bytes or operations a second, sizes are bytes.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION: Final = 1

Text: TypeAlias = Annotated[str, Field(min_length=1)]
Sha256: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, Field(ge=1)]
Scalar: TypeAlias = Annotated[str | int | float | bool, Field(union_mode="left_to_right")]

# The kernels of one step in launch order: a case may hold samples of each, of some together, or of all.
STEP_KERNELS = ("append", "schedule", "attend", "combine")
MAIN_SERIES = ("attend+combine", "step", "call")


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Gpu(_Block):
    """One device and its state; what could not be asked is None."""

    name: Text
    uuid_sha256: Sha256 | None = None
    compute_capability: Text  # "9.0"
    multiprocessors: AtLeastOne
    l2_bytes: Count | None = None
    memory_bytes: Count | None = None
    driver: Text  # the CUDA version the driver offers, "13.0"
    driver_release: str | None = None  # "580.65.06"
    nvrtc: str | None = None
    ecc: bool | None = None
    mig: bool | None = None
    persistence: bool | None = None
    power_limit_w: Positive | None = None
    sm_clock_mhz: tuple[Positive, Positive] | None = None  # before, after
    memory_clock_mhz: tuple[Positive, Positive] | None = None
    temperature_c: tuple[float, float] | None = None
    throttle_reasons: tuple[str, ...] | None = None  # those seen before or after; () = asked, none seen
    other_processes: Count | None = None


class Environment(_Block):
    """The machine and the versions; no host name, no user name, no path."""

    python: Text
    system: Text  # "Linux 6.8.0 x86_64"
    cpu: Text
    cores: AtLeastOne | None = None
    governor: str | None = None
    load: tuple[float, float] | None = None  # one-minute load before and after
    packages: dict[str, str] = {}
    gpu: Gpu | None = None


class Ceiling(_Block):
    """A rate that the same machine reached in the same run by the plainest program for it.

    Attributes:
        what: `read` and `copy` count bytes, `matmul` counts operations, `launch` is microseconds of an empty
            kernel inside a graph.
        value: bytes/s, operations/s or microseconds.
        dtype: of a matmul.
        method: how it was measured, in words.
        samples: the single values, in order, in the unit of `value`.
    """

    what: Literal["read", "copy", "l2_read", "matmul", "launch"]
    value: Positive
    dtype: str | None = None
    method: Text
    samples: tuple[Positive, ...] = ()


class Samples(_Block):
    """Times of one thing, microseconds a call, in the order in which they were taken.

    Attributes:
        what: `attend+combine`, `step`, one of `STEP_KERNELS`, or `call` for a CPU function.
        timing: `graph` replay, `eager` calls between events, or the CPU's `wall` clock.
        values: microseconds a call.
        blocks: how many consecutive values belong together. Blocks were taken at different moments of the
            run, so the spread between them is the A/A noise that a comparison is calibrated by.
        median_us: only where a source kept no values.
        calls: calls that one value averages over.
        warmups: calls before the first value.
        l2: whether inputs were rotated beyond the L2 (`cold`) or were read again (`warm`).
    """

    what: Text
    timing: Literal["graph", "eager", "wall"]
    values: tuple[Positive, ...] = ()
    blocks: tuple[AtLeastOne, ...] = ()
    median_us: Positive | None = None
    calls: AtLeastOne = 1
    warmups: Count = 0
    l2: Literal["cold", "warm"] | None = None

    @model_validator(mode="after")
    def _values_or_median(self) -> Self:
        if bool(self.values) == (self.median_us is not None):
            raise ValueError("needs values, or median_us where no values were kept, and not both")
        if self.blocks and sum(self.blocks) != len(self.values):
            raise ValueError(f"blocks sum to {sum(self.blocks)}, but there are {len(self.values)} values")
        return self

    @property
    def median(self) -> float:
        """Median of the values, microseconds."""
        return statistics.median(self.values) if self.median_us is None else self.median_us

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """First and third quartile (inclusive method), or None with fewer than two values."""
        if len(self.values) < 2:
            return None
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def percentile(self, share: float) -> float | None:
        """Return a percentile (0 to 100) by linear interpolation, or None where no values were kept."""
        if not self.values:
            return None
        ordered, place = sorted(self.values), share / 100 * (len(self.values) - 1)
        low, part = int(place), place - int(place)
        return ordered[low] + part * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    def in_blocks(self) -> tuple[tuple[float, ...], ...]:
        """Return the values cut into their blocks; one block where none are named."""
        cut, start = [], 0
        for size in self.blocks or (len(self.values),):
            cut.append(self.values[start : start + size])
            start += size
        return tuple(cut)


class Shape(_Block):
    """The sizes of a paged-attention case.

    Attributes:
        context: mean length a sequence, new tokens included; `context_range` where lengths differ.
        query: mean new tokens a sequence; `query_range` where they differ.
    """

    layout: Literal["LATENT", "SEPARATE"]
    dtype: Text
    cache_dtype: Text
    heads: AtLeastOne
    kv_heads: AtLeastOne = 1
    head_size: AtLeastOne
    v_head_size: AtLeastOne
    block_size: AtLeastOne
    batch: AtLeastOne
    context: Positive
    context_range: tuple[AtLeastOne, AtLeastOne] | None = None
    query: Positive = 1.0
    query_range: tuple[AtLeastOne, AtLeastOne] | None = None


class Work(_Block):
    """What a case must move and compute at least: KV bytes once, operations of both products."""

    bytes: Count
    operations: Count


class Correctness(_Block):
    """The check that came before the clock: relative error of the whole output against a reference."""

    reference: Text  # "paged_oracle exact", "float64 attention of three sequences"
    relative_error: Annotated[float, Field(ge=0)]
    tolerance: Positive | None = None


class Variant(_Block):
    """One compiled kernel that ran: what it is and what it takes of a multiprocessor."""

    kernel: Text  # the source file, "sm80_latent.cu"
    symbol: str | None = None
    description: str | None = None  # tiles and stages, in words
    arch: str | None = None
    registers: Count | None = None
    spill_bytes: Count | None = None  # local memory a thread
    static_shared_bytes: Count | None = None
    dynamic_shared_bytes: Count | None = None
    threads: AtLeastOne | None = None
    blocks_per_multiprocessor: Count | None = None


class Memory(_Block):
    """Bytes on the device around a case; `run_allocations` is what the operator allocated while running."""

    workspace_bytes: Count | None = None
    cache_bytes: Count | None = None
    input_bytes: Count | None = None
    output_bytes: Count | None = None
    device_used_before: Count | None = None
    device_used_after: Count | None = None
    device_used_peak: Count | None = None
    run_allocations: Count | None = None


class PeerRow(_Block):
    """Another implementation on the same case: its samples, or why there are none."""

    peer: Text
    failed: str | None = None  # why: "not installed", "wrong output: 0.3 of 0.01", "head size not supported"
    correctness: Correctness | None = None
    series: tuple[Samples, ...] = ()

    @model_validator(mode="after")
    def _measured_or_failed(self) -> Self:
        if bool(self.series) == (self.failed is not None):
            raise ValueError("a peer has samples, or says why it failed, and not both")
        return self


class Case(_Block):
    """One thing measured. `id` is what comparisons match by and never changes its meaning.

    Attributes:
        id: stable, lower case, parts divided by `/`: `latent/576-512/bf16/h16/p64/decode/b128/c4096`.
        title: for people, as the pages print it.
        group: which table it belongs to: decode, speculative, ragged, mixed, prefill, separate, schema, …
        failed: why there are no samples; a failed case stays in the record.
        parameters: anything else that says what was run.
    """

    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.,+=-]*(/[a-z0-9_.,+=-]+)*$")]
    title: Text
    group: Text
    shape: Shape | None = None
    parameters: dict[str, Scalar] = {}
    work: Work | None = None
    correctness: Correctness | None = None
    failed: str | None = None
    series: tuple[Samples, ...] = ()
    variants: tuple[Variant, ...] = ()
    memory: Memory | None = None
    peers: tuple[PeerRow, ...] = ()

    @model_validator(mode="after")
    def _measured_or_failed(self) -> Self:
        if not self.series and not self.peers and self.failed is None:
            raise ValueError(f"case {self.id} has no samples, no peers and no reason why")
        names = [(one.what, one.timing) for one in self.series]
        if len(names) != len(set(names)):
            raise ValueError(f"case {self.id} has two series of the same name and timing")
        return self

    def samples(self, what: str | None = None, timing: str | None = None) -> Samples | None:
        """Return the series of that name and timing; without a name, the main one."""
        wanted = MAIN_SERIES if what is None else (what,)
        for name in wanted:
            for one in self.series:
                if one.what == name and timing in (None, one.timing):
                    return one
        return None


class Peer(_Block):
    """An implementation that was looked for."""

    name: Text
    version: str | None = None
    notes: str | None = None
    failed: str | None = None  # why it took no part at all


class Suite(_Block):
    """Which cases were meant to run; the digest is over their definitions."""

    name: Text
    digest: Sha256 | None = None


class Kernels(_Block):
    """Which kernel sources ran: one digest over all, and one of each file with its includes in place."""

    digest: Sha256
    files: dict[str, Sha256] = {}


class History(_Block):
    """Why the figures are not those of the present sources, and since when."""

    because: Text
    since: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]


class Revision(_Block):
    """The commit that was measured; `dirty` when the tree had changes, None when that is not known."""

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,64}$")]
    dirty: bool | None = None


class Record(_Block):
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
    code: dict[str, Sha256] = {}
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
