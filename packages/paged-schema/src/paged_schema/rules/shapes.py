"""What the run-stage rules share: one rank, one dimension, compared.

A comparison that needs a dimension which the model leaves symbolic or unknown is undecided, and passes.
"""

from __future__ import annotations

from paged_schema.facts import known
from paged_schema.inputs import TensorSpec
from paged_schema.rules.registry import Fault


def rank_fault(name: str, spec: TensorSpec | None, rank: int) -> Fault | None:
    """Return the fault of a tensor whose rank is known and not as expected."""
    if spec is None or spec.shape is None or len(spec.shape) == rank:
        return None
    return Fault(name, f"rank {len(spec.shape)}", f"rank {rank}")


def dim_of(spec: TensorSpec | None, index: int) -> int | None:
    """Return one dimension of a tensor whose rank was checked, if it is known."""
    return None if spec is None or spec.shape is None else known(spec.shape[index])


def dim_fault(
    name: str, spec: TensorSpec | None, index: int, expected: int | None, what: str
) -> Fault | None:
    """Return the fault of a dimension that is known and not as expected; `what` names the number."""
    got = dim_of(spec, index)
    # No size can equal a negative one, which only an overflow expects.
    if spec is None or expected is None or got == expected or (got is None and expected >= 0):
        return None
    return Fault(name, f"dimension {index} of {'?' if got is None else got}", f"{expected}, {what}")
