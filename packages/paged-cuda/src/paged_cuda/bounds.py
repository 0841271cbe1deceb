"""The largest batch that one prepared operator serves.

Grids, workspace and kernel variants come from here and from the call, never from the lengths of a step.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from paged_cuda.errors import ArgumentMismatch

if TYPE_CHECKING:
    from paged_schema import Call

# Debug kernels pack a token's row into 28 bits, and no device holds more rows than that.
MAX_TOKENS = 2**28 - 1
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper limits of one step.

    Attributes:
        max_batch: Sequences, live or padding.
        max_tokens: New tokens of all sequences together.
        max_context: Keys of one sequence, the new ones included.

    Example:
        >>> Bounds(max_batch=64, max_tokens=256, max_context=131_072).max_batch
        64
    """

    max_batch: int
    max_tokens: int
    max_context: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            limit = MAX_TOKENS if field.name == "max_tokens" else INT32_MAX
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise ArgumentMismatch("bounds", field.name, value, f"an integer from 1 to {limit}")

    def max_blocks(self, block_size: int) -> int:
        """Return the block table columns that `max_context` needs."""
        return -(-self.max_context // block_size)

    def admit(self, call: Call) -> None:
        """Refuse a call whose known extents are larger than these bounds.

        Raises:
            ArgumentMismatch: The call's batch or tokens exceed a bound.
        """
        for name, extent, limit in (
            ("batch", call.batch, self.max_batch),
            ("tokens", call.tokens, self.max_tokens),
        ):
            if isinstance(extent, int) and extent > limit:
                raise ArgumentMismatch(
                    "bounds", name, extent, f"at most max_{name} = {limit}; raise the bound"
                )


def check_metadata(metadata: Sequence[int] | None) -> None:
    """Check the two or three host bounds of a call; nothing here depends on them.

    Raises:
        ArgumentMismatch: Not two or three integers, or a negative one.
    """
    if metadata is None:
        return
    try:
        bounds = tuple(operator.index(bound) for bound in metadata)
    except TypeError:
        bounds = ()
    if len(bounds) not in (2, 3) or min(bounds) < 0:
        wanted = "two or three host integers, none negative"
        raise ArgumentMismatch("metadata", "attention_metadata", repr(metadata), wanted)
