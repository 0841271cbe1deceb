"""Times of one thing, and the little statistics that follow from them."""

from __future__ import annotations

import statistics
from typing import Literal, Self

from pydantic import model_validator

from paged_bench.record.types import AtLeastOne, Block, Count, Positive, Text

# The kernels of one step in launch order: a case may hold samples of each, of some together, or of all.
STEP_KERNELS = ("append", "schedule", "attend", "combine")
MAIN_SERIES = ("attend+combine", "step", "call")


class Samples(Block):
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
