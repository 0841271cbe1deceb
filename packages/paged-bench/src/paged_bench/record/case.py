"""One thing measured: what it was, that it was right, what ran, and how long it and others took."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paged_bench.record.samples import MAIN_SERIES, Samples
from paged_bench.record.types import AtLeastOne, Block, Count, Positive, Scalar, Text


class Shape(Block):
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


class Work(Block):
    """What a case must move and compute at least: KV bytes once, operations of both products."""

    bytes: Count
    operations: Count


class Correctness(Block):
    """The check that came before the clock: relative error of the whole output against a reference."""

    reference: Text  # "paged_oracle exact", "float64 attention of three sequences"
    relative_error: Annotated[float, Field(ge=0)]
    tolerance: Positive | None = None


class Variant(Block):
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


class Memory(Block):
    """Bytes on the device around a case; `run_allocations` is what the operator allocated while running."""

    workspace_bytes: Count | None = None
    cache_bytes: Count | None = None
    input_bytes: Count | None = None
    output_bytes: Count | None = None
    device_used_before: Count | None = None
    device_used_after: Count | None = None
    device_used_peak: Count | None = None
    run_allocations: Count | None = None


class PeerRow(Block):
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


class Case(Block):
    """One thing measured. `id` is what comparisons match by and never changes its meaning.

    Attributes:
        id: stable, lower case, parts divided by `/`: `latent/576-512/bf16/h16/p64/decode/b128/c4096`.
        title: for people, as the pages print it.
        group: which table it belongs to: decode, speculative, ragged, mixed, prefill, separate, schema, …
        failed: why there are no samples; a failed case stays in the record.
        parameters: anything else that says what was run.
    """

    id: Annotated[str, Field(pattern=r"^[a-z0-9][_a-z0-9.,+=-]*(/[_a-z0-9.,+=-]+)*$")]
    title: Text
    group: Text
    shape: Shape | None = None
    parameters: dict[str, Scalar] = Field(default={})
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
