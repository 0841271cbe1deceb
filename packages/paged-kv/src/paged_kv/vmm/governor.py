"""The one place that says whether memory may be taken: leases, growth grants, and a refusal that is a value.

It never takes memory away: it asks holders, lowest priority first, to give way. A failed reservation changes
nothing. One grant is open at a time, first come first served, and ordinary claims wait for it, so that
nobody takes the bytes that a growth was promised. It makes no driver call and calls back only without its
lock. What is waited for is taken in the order controller, storage, grant, capture gate, arena, handle pool.
"""

from __future__ import annotations

import atexit
import logging
from weakref import WeakSet

from paged_kv.errors import GrantOverrun, InvalidGeometry
from paged_kv.geometry import as_size, is_integer

from .accounts import HolderAccounts
from .geometry import MAX_BYTES
from .grant import MappedGrowthGrant, Sources
from .lease import Holder, MemoryLease
from .ledger import Account, AdmissionRefused, Reclaim, Tier, TierLedger, TierStats
from .turns import Ticket, Turns

GRANT_TIMEOUT = 10.0

_log = logging.getLogger("paged_kv.vmm")
_governors: WeakSet[MemoryGovernor] = WeakSet()


class MemoryGovernor(HolderAccounts):
    """Tiers of memory and who has what of them. Any thread may call it.

    Example:
        >>> governor = MemoryGovernor(device=100)
        >>> cache = governor.register("cache")
        >>> with governor.reserve("weights", 60), governor.grant(cache, 30) as grant:
        ...     grant.settle(20)
        >>> governor.tier(Tier.DEVICE)
        TierStats(limit=100, used=20, growth_reserved=0)
        >>> refused = governor.grant(cache, 90)
        >>> refused.available, refused.http_status
        (80, 429)

    Args:
        device: bytes of device memory to govern.
        host: bytes of host memory.
        disk: bytes on disk.
    """

    def __init__(self, *, device: int = 0, host: int = 0, disk: int = 0) -> None:
        self._ledgers = {
            tier: TierLedger(as_size(tier, nbytes, 0, MAX_BYTES))
            for tier, nbytes in ((Tier.DEVICE, device), (Tier.HOST, host), (Tier.DISK, disk))
        }
        super().__init__()
        self._turns = Turns(self._lock)
        self._open: MappedGrowthGrant | None = None
        self._collecting = False
        _governors.add(self)

    def register(
        self, name: str, tier: Tier = Tier.DEVICE, *, priority: int = 0, reclaim: Reclaim | None = None
    ) -> Holder:
        """Open an account.

        Args:
            name: for reports.
            tier: which memory.
            priority: who gives way first: the lowest.
            reclaim: called with the bytes that another one needs, without any lock of the governor; frees
                what it can, such as pooled handles, and returns the bytes to spare. It has the other one's
                turn: it must not wait for a thread that may be waiting for a grant, such as one that grows
                a cache. None: never asked.

        Raises:
            InvalidGeometry: there is no such tier, or the priority is no integer.
        """
        if not is_integer(priority):
            raise InvalidGeometry(f"priority is {priority!r}; it must be an integer", priority=repr(priority))
        holder = Holder(str(name), tier)
        with self._lock:
            self._accounts[holder] = Account(self._ledger(tier), int(priority), reclaim)
        return holder

    def lease_allowance(
        self, holder: Holder, nbytes: int, *, timeout: float = GRANT_TIMEOUT
    ) -> AdmissionRefused | None:
        """Lease bytes for the holder's later growth; None when done.

        Releasing handles does not give them back. What the holder does not use may go to others when its
        `reclaim` gives way; the rest goes when it is unregistered.

        Raises:
            InvalidGeometry: not a size.
            ForeignGrant: not a holder of this governor.
            GrantOpen: this thread holds a grant.
        """
        size = as_size("nbytes", nbytes, 0, MAX_BYTES)
        with self._lock:
            account = self._account(holder)
        refused = self._take(account.ledger, size, holder.name, holder.tier, timeout)
        if refused is None:
            with self._lock:
                account.allowance += size
                account.floor += size
        return refused

    def unregister(self, holder: Holder) -> None:
        """Close an account and give back its allowance.

        Raises:
            ForeignGrant: not a holder of this governor.
            GrantOverrun: it still owns memory, or a grant is open or being collected, which may return bytes
                to it.
        """
        with self._lock:
            account = self._account(holder)
            granting = self._collecting or self._open is not None
            if account.owned or granting:
                raise GrantOverrun(
                    f"{holder.name!r} owns {account.owned} bytes (grant open: {granting}); "
                    "close what owns them and settle the grant first",
                    owned=account.owned,
                    mapped=account.mapped,
                )
            account.apply_lease(-account.allowance)
            del self._accounts[holder]

    def reserve(
        self, name: str, nbytes: int, tier: Tier = Tier.DEVICE, *, timeout: float = GRANT_TIMEOUT
    ) -> MemoryLease | AdmissionRefused:
        """Lease bytes for something that does not grow, such as weights.

        Raises:
            InvalidGeometry: a number is out of range, or there is no such tier.
            GrantOpen: this thread holds a grant.
        """
        size = as_size("nbytes", nbytes, 0, MAX_BYTES)
        refused = self._take(self._ledger(tier), size, name, tier, timeout)
        return MemoryLease(self, name, size, tier) if refused is None else refused

    def grant(
        self, holder: Holder, nbytes: int, *, timeout: float = GRANT_TIMEOUT
    ) -> MappedGrowthGrant | AdmissionRefused:
        """The right to map `nbytes` more, in the order of asking.

        Looks at the holder's pooled handles and unused allowance, then at what nobody leased, then asks
        others to give way.

        Raises:
            InvalidGeometry: not a size.
            ForeignGrant: not a holder of this governor.
            GrantOpen: this thread holds a grant already.
        """
        size = as_size("nbytes", nbytes, 0, MAX_BYTES)
        with self._lock:
            account = self._account(holder)
        ticket = self._turns.take(timeout)
        if ticket is None:
            return self._refusal(account.ledger, size, holder.name, holder.tier, 0, "open_grant")
        sources = Sources()
        self._collecting = True
        try:
            missing = self._collect(account, size, sources)
            if not missing:
                self._open = MappedGrowthGrant(self, holder, size, sources, ticket)
                return self._open
        except BaseException:
            self._apply_abandon(account, sources, ticket)
            raise
        finally:
            self._collecting = False
        self._apply_abandon(account, sources, ticket)
        return self._refusal(account.ledger, size, holder.name, holder.tier, size - missing)

    def claim_handles(
        self, holder: Holder, nbytes: int, *, timeout: float = GRANT_TIMEOUT
    ) -> AdmissionRefused | None:
        """Account for physical handles that are about to be created ahead of need; None when granted.

        They are on the way: `pooled` says that they are there, `released` that they are not.

        Raises:
            InvalidGeometry: not a size.
            ForeignGrant: not a holder of this governor.
            GrantOpen: this thread holds a grant.
        """
        size = as_size("nbytes", nbytes, 0, MAX_BYTES)
        with self._lock:
            account = self._account(holder)
        with self._turns.turn(timeout) as mine:
            if not mine:
                return self._refusal(account.ledger, size, holder.name, holder.tier, 0, "open_grant")
            with self._lock:
                extra, room = max(0, size - account.unused), account.ledger.available
                if extra > room:
                    had = account.unused + room
                    return self._refusal(account.ledger, size, holder.name, holder.tier, had)
                account.apply_lease(extra)
                account.owned += size
                account.moving += size
        return None

    def tier(self, tier: Tier) -> TierStats:
        """A snapshot of a tier."""
        with self._lock:
            ledger = self._ledger(tier)
            return TierStats(ledger.limit, ledger.used, ledger.growth_reserved)

    @property
    def open_grant(self) -> MappedGrowthGrant | None:
        """The grant that is neither settled nor rolled back, if there is one."""
        return self._open

    def apply_settle(self, grant: MappedGrowthGrant, mapped: int, owned: int, quarantined: int) -> None:
        """What `MappedGrowthGrant.settle` does once its numbers are right."""
        with self._lock:
            account, sources = self._accounts[grant.holder], grant.sources
            account.mapped += mapped
            account.owned += owned
            account.quarantined += quarantined
            account.held = 0
            keeps = max(0, -account.unused)
            account.ledger.growth_reserved -= sources.reserved
            sources.apply_return(keeps)
            account.apply_lease(keeps)
            self._open = None
        self._turns.apply_pass(grant.apply_end())

    def apply_return(self, lease: MemoryLease) -> None:
        """What `MemoryLease.release` does the first time."""
        with self._lock:
            self._ledgers[lease.tier].used -= lease.nbytes

    def _take(
        self, ledger: TierLedger, nbytes: int, name: str, tier: Tier, timeout: float
    ) -> AdmissionRefused | None:
        """Lease from what nobody has; None when done."""
        with self._turns.turn(timeout) as mine:
            if not mine:
                return self._refusal(ledger, nbytes, name, tier, 0, "open_grant")
            with self._lock:
                if nbytes > ledger.available:
                    return self._refusal(ledger, nbytes, name, tier, ledger.available)
                ledger.used += nbytes
        return None

    def _collect(self, account: Account, nbytes: int, sources: Sources) -> int:
        """Hold what can be had; the bytes that are missing."""
        with self._lock:
            sources.pooled = account.held = min(nbytes, account.pooled)
            missing = nbytes - sources.pooled
            sources.own = min(missing, account.unused)
            missing -= sources.own
            missing -= self._apply_hold(account.ledger, missing, sources)
            victims = sorted(self._accounts.values(), key=lambda other: other.priority)
        for victim in victims:
            if not missing:
                break
            if victim is account or victim.ledger is not account.ledger or victim.reclaim is None:
                continue
            offered = victim.reclaim(missing)
            with self._lock:
                # What it released is nobody's now; what it only leased is taken over as it is.
                missing -= self._apply_hold(account.ledger, missing, sources)
                given = max(0, min(offered, missing, victim.unused))
                victim.apply_lease(-given)
                victim.ledger.growth_reserved += given
                sources.victims.append((victim, given))
            missing -= given
        return missing

    @staticmethod
    def _apply_hold(ledger: TierLedger, nbytes: int, sources: Sources) -> int:
        """Hold what nobody leased, up to `nbytes`; how much that was."""
        held = min(nbytes, ledger.available)
        ledger.growth_reserved += held
        sources.unassigned += held
        return held

    def _apply_abandon(self, account: Account, sources: Sources, ticket: Ticket) -> None:
        with self._lock:
            account.ledger.growth_reserved -= sources.reserved
            account.held = 0
            sources.apply_return(0)
        self._turns.apply_pass(ticket)

    def _ledger(self, tier: Tier) -> TierLedger:
        ledger = self._ledgers.get(tier)
        if ledger is None:
            raise InvalidGeometry(f"there is no tier {tier!r}; use a Tier", tier=repr(tier))
        return ledger

    @staticmethod
    def _refusal(
        ledger: TierLedger, needed: int, name: str, tier: Tier, available: int, reason: str = "capacity"
    ) -> AdmissionRefused:
        return AdmissionRefused(needed, available, ledger.limit, tier, str(name), reason)


def report_open_grants() -> list[str]:
    """Log every grant that is still open, and return what was logged; runs at the end of the process too."""
    found = [
        f"a grant of {grant.nbytes} bytes for {grant.holder.name!r} was never settled"
        for governor in list(_governors)
        if (grant := governor.open_grant) is not None
    ]
    for line in found:
        _log.warning("%s", line)
    return found


atexit.register(report_open_grants)
