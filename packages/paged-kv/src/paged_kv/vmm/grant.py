"""A grant: the right to map so many bytes, which ends with what was really mapped, or with nothing.

A grant holds its sources from the moment it is given: the holder's own pooled and unused bytes, then what
nobody leased, then what others gave way. Settling keeps what is there now and returns the rest, to those who
gave way first, in reverse. Leaving the block without settling gives everything back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from paged_kv.errors import ForeignGrant, GrantOverrun, GrantSettled
from paged_kv.geometry import is_integer

from .ledger import Account

if TYPE_CHECKING:
    from .governor import MemoryGovernor
    from .lease import Holder
    from .turns import Ticket


@dataclass(slots=True)
class Sources:
    """Where the bytes of a grant come from, in the order in which they are looked for.

    Attributes:
        pooled: handles that the holder has ready.
        own: allowance that the holder does not use.
        unassigned: bytes of the tier that nobody leased.
        victims: who gave way, and how much.
    """

    pooled: int = 0
    own: int = 0
    unassigned: int = 0
    victims: list[tuple[Account, int]] = field(default_factory=list)

    @property
    def reserved(self) -> int:
        """Bytes held beside the holder's own."""
        return self.unassigned + sum(given for _, given in self.victims)

    @property
    def fresh(self) -> int:
        """Bytes of new physical memory that they allow."""
        return self.own + self.reserved

    def apply_return(self, ledger_keeps: int) -> None:
        """Return what exceeds `ledger_keeps`: to the last who gave way first, then to the tier."""
        excess = self.reserved - ledger_keeps
        for account, given in reversed(self.victims):
            back = min(given, excess)
            account.apply_lease(back)
            excess -= back


class MappedGrowthGrant:
    """One open right to map bytes; a context manager.

    Only `MemoryGovernor.grant` makes one that works. Python cannot forbid forging; a grant that this
    governor does not know, or that was used, is refused.

    Attributes:
        holder: who may map.
        nbytes: how much.
    """

    __slots__ = ("__weakref__", "_governor", "_ticket", "holder", "nbytes", "sources")

    def __init__(
        self, governor: MemoryGovernor, holder: Holder, nbytes: int, sources: Sources, ticket: Ticket
    ) -> None:
        self._governor = governor
        self._ticket: Ticket | None = ticket
        self.holder = holder
        self.nbytes = nbytes
        self.sources = sources

    @property
    def is_open(self) -> bool:
        """Whether it was neither settled nor rolled back."""
        return self._ticket is not None

    def require(self, governor: MemoryGovernor, holder: Holder) -> None:
        """Refuse a grant that does not entitle `holder` to map anything.

        Raises:
            ForeignGrant: another governor's, or another holder's.
            GrantSettled: it was ended before.
        """
        if governor is not self._governor or holder is not self.holder:
            raise ForeignGrant(
                f"this grant of {self.nbytes} bytes is for {self.holder.name!r} of another governor or arena",
                nbytes=self.nbytes,
                holder=self.holder.name,
            )
        if self._ticket is None:
            raise GrantSettled(
                f"this grant of {self.nbytes} bytes was settled or rolled back; ask for another",
                nbytes=self.nbytes,
            )

    def settle(self, mapped: int, owned: int | None = None, quarantined: int = 0) -> None:
        """End the grant with what really happened.

        Args:
            mapped: bytes mapped now that were not before.
            owned: bytes of physical memory created and kept; None for what the pool did not cover.
            quarantined: of those, bytes that are not mapped and can neither be used nor released.

        Raises:
            GrantSettled: it was ended before.
            GrantOverrun: not bytes, more than was granted, or more mapped than there are handles for.
        """
        self.require(self._governor, self.holder)
        pooled, fresh = self._governor.account(self.holder).pooled, self.sources.fresh
        created = max(0, mapped - self.sources.pooled) if owned is None and is_integer(mapped) else owned
        if (
            not (is_integer(mapped) and is_integer(created) and is_integer(quarantined))
            or not (0 <= mapped <= self.nbytes and 0 <= quarantined <= created <= fresh)
            or mapped > pooled + created - quarantined
        ):
            raise GrantOverrun(
                f"{mapped!r} bytes mapped, {created!r} created and {quarantined!r} of them out of service "
                f"under a grant of {self.nbytes}, of which {fresh} may be new; {pooled} are pooled",
                mapped=mapped,
                owned=created,
                quarantined=quarantined,
                granted=self.nbytes,
                fresh=fresh,
                pooled=pooled,
            )
        self._governor.apply_settle(self, int(mapped), int(created), int(quarantined))

    def rollback(self) -> None:
        """End the grant with nothing mapped.

        Raises:
            GrantSettled: it was ended before.
        """
        self.settle(0, 0)

    def apply_end(self) -> Ticket:
        """Close it; the turn to give on."""
        ticket, self._ticket = self._ticket, None
        assert ticket is not None
        return ticket

    def __enter__(self) -> MappedGrowthGrant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_open:
            self.rollback()
