"""The numbers of the governor: what a tier may hold, what is leased of it, and what each holder has.

Two axes. *Mapped* bytes back addresses and are what a holder is billed for. *Owned* bytes are physical
handles: mapped, waiting in a pool, on the way into or out of one, or quarantined. A holder's allowance is a
lease of the tier and covers what it owns: ``mapped <= owned <= allowance``, and ``used + growth_reserved <=
limit``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

Reclaim = Callable[[int], int]


class Tier(StrEnum):
    """Where memory is."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class AdmissionRefused:
    """There is no memory for it, and nothing was changed. A value: a server answers before its headers.

    Attributes:
        needed: bytes asked for.
        available: bytes that could have been given.
        limit: bytes of the tier.
        tier: which memory.
        holder: who asked.
        reason: ``"capacity"``, or ``"open_grant"`` when another grant did not end in time.
    """

    needed: int
    available: int
    limit: int
    tier: Tier
    holder: str
    reason: str = "capacity"

    @property
    def retryable(self) -> bool:
        """Whether waiting can help: the tier is large enough."""
        return self.needed <= self.limit

    @property
    def http_status(self) -> int:
        """429 (too many requests) when waiting can help, else 413 (content too large)."""
        return 429 if self.retryable else 413


@dataclass(frozen=True, slots=True)
class TierStats:
    """Bytes of one tier."""

    limit: int
    used: int
    growth_reserved: int

    @property
    def available(self) -> int:
        """Bytes that nobody leased and no grant holds."""
        return self.limit - self.used - self.growth_reserved


@dataclass(frozen=True, slots=True)
class AccountStats:
    """Bytes of one holder: leased, mapped, physically there, and of these out of service or on the way."""

    allowance: int
    mapped: int
    owned: int
    quarantined: int
    moving: int

    @property
    def pooled(self) -> int:
        """Physical bytes that wait in a pool."""
        return self.owned - self.mapped - self.quarantined - self.moving


@dataclass(slots=True)
class TierLedger:
    """The mutable form of `TierStats`."""

    limit: int
    used: int = 0
    growth_reserved: int = 0

    @property
    def available(self) -> int:
        """Bytes that nobody leased and no grant holds."""
        return self.limit - self.used - self.growth_reserved


@dataclass(slots=True)
class Account:
    """The mutable form of `AccountStats`, and how its holder gives way.

    Attributes:
        floor: the allowance that releasing handles does not give back; giving way to others does.
        priority: who is asked first to give way: the lowest.
        reclaim: asked to give up bytes that are not owned; says how many it can spare.
        held: pooled bytes that an open grant of the holder counts on.
    """

    ledger: TierLedger
    priority: int
    reclaim: Reclaim | None
    floor: int = 0
    allowance: int = 0
    mapped: int = 0
    owned: int = 0
    quarantined: int = 0
    moving: int = 0
    held: int = 0

    @property
    def pooled(self) -> int:
        """Physical bytes that wait in a pool."""
        return self.owned - self.mapped - self.quarantined - self.moving

    @property
    def unused(self) -> int:
        """Leased bytes that no physical memory stands for."""
        return self.allowance - self.owned

    def apply_lease(self, nbytes: int) -> None:
        """Move bytes from the tier to the allowance; negative to give back."""
        self.allowance += nbytes
        self.ledger.used += nbytes
