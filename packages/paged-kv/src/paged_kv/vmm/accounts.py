"""What each holder has, kept in step with what its pool and its arenas do.

These calls only note what happened: the handles are mapped, pooled, on their way, gone, or quarantined. They
wait for no grant, and each is one change under the governor's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paged_kv.errors import ForeignGrant, GrantOverrun
from paged_kv.geometry import is_integer

from .lease import Holder
from .ledger import Account, AccountStats, Reclaim


class HolderAccounts:
    """The accounts of a governor's holders."""

    def __init__(self) -> None:
        self._accounts: dict[Holder, Account] = {}
        self._lock = threading.Condition()

    def account(self, holder: Holder) -> AccountStats:
        """A snapshot of a holder.

        Raises:
            ForeignGrant: not a holder of this governor.
        """
        with self._lock:
            account = self._account(holder)
            return AccountStats(
                account.allowance, account.mapped, account.owned, account.quarantined, account.moving
            )

    def set_reclaim(self, holder: Holder, reclaim: Reclaim | None) -> None:
        """Replace what is called when another holder needs bytes; see `register`.

        Raises:
            ForeignGrant: not a holder of this governor.
        """
        with self._lock:
            self._account(holder).reclaim = reclaim

    def unmapped(self, holder: Holder, nbytes: int) -> None:
        """Bytes are mapped no longer; their handles are on the way to the pool, or out.

        Raises:
            ForeignGrant: not a holder of this governor.
            GrantOverrun: more than are mapped.
        """
        with self._noting("unmapped", holder, nbytes, lambda own: own.mapped) as account:
            account.mapped -= nbytes
            account.moving += nbytes

    def pooled(self, holder: Holder, nbytes: int) -> None:
        """Handles that were on the way wait in the pool now.

        Raises:
            ForeignGrant: not a holder of this governor.
            GrantOverrun: more than are on the way.
        """
        with self._noting("pooled", holder, nbytes, lambda own: own.moving) as account:
            account.moving -= nbytes

    def withdraw(self, holder: Holder, nbytes: int) -> int:
        """Take handles out of the pool to release them; how many bytes may go: no open grant counts on them.

        Raises:
            ForeignGrant: not a holder of this governor.
            GrantOverrun: more than are pooled.
        """
        with self._noting("withdrawn", holder, nbytes, lambda own: own.pooled) as account:
            allowed = max(0, min(nbytes, account.pooled - account.held))
            account.moving += allowed
            return allowed

    def released(self, holder: Holder, nbytes: int) -> None:
        """Handles on the way are gone, and the allowance above what was leased for good with them.

        Raises:
            ForeignGrant: not a holder of this governor.
            GrantOverrun: more than are on the way.
        """
        with self._noting("released", holder, nbytes, lambda own: own.moving) as account:
            account.moving -= nbytes
            account.owned -= nbytes
            account.apply_lease(-min(nbytes, max(0, account.allowance - max(account.floor, account.owned))))

    def quarantined(self, holder: Holder, nbytes: int) -> None:
        """Handles on the way could not be released: they stay owned for good.

        Raises:
            ForeignGrant: not a holder of this governor.
            GrantOverrun: more than are on the way.
        """
        with self._noting("quarantined", holder, nbytes, lambda own: own.moving) as account:
            account.moving -= nbytes
            account.quarantined += nbytes

    def _account(self, holder: Holder) -> Account:
        account = self._accounts.get(holder)
        if account is None:
            raise ForeignGrant(f"{holder!r} is no holder of this governor; register it", holder=repr(holder))
        return account

    @contextmanager
    def _noting(
        self, what: str, holder: Holder, nbytes: int, part: Callable[[Account], int]
    ) -> Iterator[Account]:
        """Hold the lock over a change to the holder's account that moves at most `part` of it."""
        with self._lock:
            account = self._account(holder)
            most = part(account)
            if not is_integer(nbytes) or not 0 <= nbytes <= most:
                raise GrantOverrun(
                    f"{nbytes!r} bytes {what}; at most {most} can be", given=nbytes, maximum=most
                )
            yield account
