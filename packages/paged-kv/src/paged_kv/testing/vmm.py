"""A cache over the fake driver, and the comparison of all books with what that driver really has."""

from __future__ import annotations

from collections.abc import Callable

from paged_kv.vmm import (
    CaptureGate,
    FakeVmmDriver,
    HandlePool,
    MemoryGovernor,
    Tier,
    VirtualArena,
)


class VmmStand:
    """A driver, a governor with one holder, its pool, and a gate of their own.

    Args:
        granule: bytes.
        limit: bytes that the governor may give.
        retain: see `HandlePool`.
        backed: see `FakeVmmDriver`.

    Attributes:
        arenas: what `assert_consistent` compares.
        leased: bytes that something beside the holder has leased.
    """

    def __init__(
        self, granule: int = 2 << 20, *, limit: int = 80 << 30, retain: int = 0, backed: bool = False
    ) -> None:
        self.gate = CaptureGate()
        self.driver = FakeVmmDriver(granule, backed=backed)
        self.governor = MemoryGovernor(device=limit)
        self.holder = self.governor.register("cache")
        self.pool = HandlePool(self.driver, self.governor, self.holder, retain=retain, gate=self.gate)
        self.arenas: list[VirtualArena] = []
        self.leased: Callable[[], int] = lambda: 0

    def watch(self, arena: VirtualArena) -> VirtualArena:
        """Compare this arena too; returns it."""
        self.arenas.append(arena)
        return arena

    def assert_consistent(self) -> None:
        """V1 to V6: arenas, pool and governor say what the driver says, and nothing impossible was asked.

        Raises:
            AssertionError: they do not.
            InvariantViolation: an arena's own books disagree.
        """
        granule, driver = self.pool.granule, self.driver
        mapped = {
            arena.address + number * granule: handle
            for arena in self.arenas
            for number, handle in arena.table.handles.items()
        }
        assert mapped == driver.mapped, "V1"
        live = [
            arena.address + number * granule
            for arena in self.arenas
            for number in arena.table.handles
            if not arena.table.poisoned[number]
        ]
        assert all(driver.accessible(address) for address in live), "V1"
        for arena in self.arenas:
            arena.check()
        account, tier = self.governor.account(self.holder), self.governor.tier(Tier.DEVICE)
        assert account.mapped == len(mapped) * granule, "V3"
        assert account.owned == driver.num_handles * granule, "V5"
        assert account.quarantined == self.pool.num_quarantined * granule, "V5"
        assert (account.pooled, account.moving) == (self.pool.count * granule, 0), "V5"
        assert tier.used == account.allowance + self.leased(), "V3"
        assert account.allowance >= account.owned, "V3"
        assert tier.used + tier.growth_reserved <= tier.limit, "V3"
        assert tier.growth_reserved == 0 or self.governor.open_grant is not None, "V3"
        assert driver.impossible == [], "V6"

    def assert_empty(self) -> None:
        """Nothing is left: no handle, event, reservation, lease.

        Raises:
            AssertionError: something is.
        """
        self.assert_consistent()
        assert (self.driver.num_handles, self.driver.num_events, self.driver.reserved_bytes) == (0, 0, 0)
        assert self.governor.account(self.holder).owned == self.leased() == 0
