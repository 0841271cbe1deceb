"""What debug kernels found wrong that the host could not see."""

from __future__ import annotations

from dataclasses import dataclass

# The numbers of `enum Violation` in kernels/layout/violations.cuh.
KINDS = {
    1: "slot out of range",
    2: "block id out of range",
    3: "negative past length",
    4: "position beyond the rotary tables",
    5: "position beyond the block table",
}
NBYTES = 16


@dataclass(frozen=True, slots=True)
class Violations:
    """Counted since the last reset.

    Attributes:
        count: How many.
        kind: What the first one was, or None.
        token: Its token's row in the batch, or None.
        value: The offending number, or None.
    """

    count: int
    kind: str | None = None
    token: int | None = None
    value: int | None = None

    @classmethod
    def decode(cls, count: int, first: int) -> Violations:
        """Read the two words that the kernels keep."""
        if count == 0:
            return cls(0)
        value = first & 0xFFFFFFFF
        return cls(count, KINDS[first >> 32 & 15], first >> 36, value - (value >> 31 << 32))
