"""Who owns memory, and a fixed piece of it that is given back once."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from paged_kv.errors import LeaseReturned

from .ledger import Tier

if TYPE_CHECKING:
    from .governor import MemoryGovernor


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """Who owns memory; known to one governor by identity."""

    name: str
    tier: Tier


class MemoryLease:
    """Bytes of a tier for something that does not grow; a context manager, given back once."""

    __slots__ = ("_governor", "name", "nbytes", "tier")

    def __init__(self, governor: MemoryGovernor, name: str, nbytes: int, tier: Tier) -> None:
        self._governor: MemoryGovernor | None = governor
        self.name = name
        self.nbytes = nbytes
        self.tier = tier

    def release(self) -> None:
        """Give the bytes back.

        Raises:
            LeaseReturned: they were given back before.
        """
        governor, self._governor = self._governor, None
        if governor is None:
            raise LeaseReturned(
                f"the lease of {self.nbytes} bytes for {self.name!r} was given back before",
                nbytes=self.nbytes,
            )
        governor.apply_return(self)

    def __enter__(self) -> MemoryLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._governor is not None:
            self.release()
