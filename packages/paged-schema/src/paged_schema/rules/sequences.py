"""RUN: the int32 tensors that describe the batch, and the small per-head tensors."""

from __future__ import annotations

from paged_schema.facts import Facts, known
from paged_schema.inputs import TensorSpec
from paged_schema.rules.registry import KERNELS, Fault, rule
from paged_schema.rules.shapes import dim_fault, dim_of, rank_fault


@rule(
    "R09a",
    "run",
    "cumulative_sequence_length has rank 1 and 2 entries or more",
    "INVALID_ARGUMENT",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    name = "cumulative_sequence_length"
    fault = rank_fault(name, f.cumulative_sequence_length, 1)
    if fault is not None:
        return fault
    length = dim_of(f.cumulative_sequence_length, 0)
    return (
        None
        if length is None or length >= 2
        else Fault(name, f"length {length}", "batch + 1 entries, at least 2")
    )


@rule(
    "R09b", "run", "past_seqlens has rank 1 and one entry a sequence", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    return _vector("past_seqlens", f.past_seqlens, known(f.batch), "the batch")


@rule("R10", "run", "block_table has rank 2 and one row a sequence", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return (
        rank_fault("block_table", f.block_table, 2)
        or dim_fault("block_table", f.block_table, 0, known(f.batch), "the batch")
    )  # fmt: skip


@rule("R11", "run", "slot_mapping has rank 1 and one entry a token", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _vector("slot_mapping", f.slot_mapping, known(f.tokens), "the tokens of query")


@rule("R12", "run", "head_sink has rank 1 and one entry a query head", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _vector("head_sink", f.head_sink, f.nh, "num_heads")


@rule(
    "R13",
    "run",
    "norm weights come in pairs, of rank 1 and head_size entries",
    "INVALID_ARGUMENT",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    if (f.q_norm_weight is None) != (f.k_norm_weight is None):
        missing = "q_norm_weight" if f.q_norm_weight is None else "k_norm_weight"
        return Fault(missing, "nothing", "both norm weights or neither")
    return (
        _vector("q_norm_weight", f.q_norm_weight, f.hs, "the head size")
        or _vector("k_norm_weight", f.k_norm_weight, f.hs, "the head size")
    )  # fmt: skip


def _vector(name: str, spec: TensorSpec | None, length: int | None, what: str) -> Fault | None:
    return rank_fault(name, spec, 1) or dim_fault(name, spec, 0, length, what)
