"""Leases, growth grants and refusals: nothing is promised twice, nothing is lost, whatever the order."""

import contextlib
import logging
import pickle
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_kv.errors import (
    ForeignGrant,
    GrantOpen,
    GrantOverrun,
    GrantSettled,
    InvalidGeometry,
    LeaseReturned,
    VmmError,
)
from paged_kv.vmm import AdmissionRefused, MappedGrowthGrant, MemoryGovernor, Tier
from paged_kv.vmm.governor import report_open_grants


def numbers(governor: MemoryGovernor, holder=None):
    tier = governor.tier(Tier.DEVICE)
    account = governor.account(holder) if holder is not None else None
    return (tier.used, tier.growth_reserved), account


def test_a_lease_is_returned_once() -> None:
    governor = MemoryGovernor(device=100)
    lease = governor.reserve("weights", 60)
    assert numbers(governor)[0] == (60, 0)
    with lease:
        assert governor.reserve("more", 41) == AdmissionRefused(41, 40, 100, Tier.DEVICE, "more")
    with pytest.raises(LeaseReturned) as caught:
        lease.release()
    assert caught.value.numbers == {"nbytes": 60}
    assert numbers(governor)[0] == (0, 0)
    early = governor.reserve("early", 10)
    with early:
        early.release()
    assert numbers(governor)[0] == (0, 0)


def test_a_refusal_is_a_value_that_a_server_can_answer_with() -> None:
    governor = MemoryGovernor(device=100)
    governor.reserve("weights", 60)
    later, never = governor.reserve("kv", 50), governor.reserve("kv", 101)
    assert (later.retryable, later.http_status) == (True, 429)
    assert (never.retryable, never.http_status) == (False, 413)
    assert pickle.loads(pickle.dumps(later)) == later
    assert numbers(governor)[0] == (60, 0)


def test_tiers_are_apart() -> None:
    governor = MemoryGovernor(device=10, host=20)
    governor.reserve("a", 10, Tier.DEVICE)
    assert governor.tier(Tier.HOST).available == 20
    assert isinstance(governor.reserve("b", 1, Tier.DISK), AdmissionRefused)
    with pytest.raises(InvalidGeometry):
        governor.register("x", priority="low")
    for bad in ("device2", None):
        with pytest.raises(InvalidGeometry):
            governor.tier(bad)
        with pytest.raises(InvalidGeometry):
            governor.reserve("c", 1, bad)


def test_sources_come_in_order_and_the_excess_goes_back_in_reverse() -> None:
    governor = MemoryGovernor(device=100)
    asked = []

    def gives(name):
        return lambda nbytes: asked.append((name, nbytes)) or nbytes

    cache = governor.register("cache")
    low = governor.register("low", priority=1, reclaim=gives("low"))
    high = governor.register("high", priority=2, reclaim=gives("high"))
    silent = governor.register("silent", priority=0)
    for holder, nbytes in ((cache, 10), (low, 20), (high, 20), (silent, 20)):
        assert governor.lease_allowance(holder, nbytes) is None
    assert governor.claim_handles(cache, 4) is None  # 4 pooled, 6 unused
    governor.pooled(cache, 4)
    grant = governor.grant(cache, 55)
    assert (grant.sources.pooled, grant.sources.own, grant.sources.unassigned) == (4, 6, 30)
    assert [given for _, given in grant.sources.victims] == [15]
    assert asked == [("low", 15)]
    assert numbers(governor)[0] == (55, 45)
    grant.settle(44)  # 4 pooled and 40 new: 6 own, 30 unassigned, 4 of low's
    assert governor.account(low).allowance == 16
    assert numbers(governor, cache) == ((44 + 16 + 20 + 20, 0), governor.account(cache))
    assert (governor.account(cache).mapped, governor.account(cache).owned) == (44, 44)
    both = governor.grant(cache, 30)
    assert [given for _, given in both.sources.victims] == [16, 14]
    both.settle(2)
    assert (governor.account(low).allowance, governor.account(high).allowance) == (14, 20)
    assert governor.account(silent).allowance == 20


def test_nobody_of_another_tier_is_asked_to_give_way() -> None:
    governor = MemoryGovernor(device=100, host=100)
    asked: list[int] = []
    other = governor.register("other", Tier.HOST, reclaim=lambda nbytes: asked.append(nbytes) or nbytes)
    governor.lease_allowance(other, 50)
    assert governor.grant(governor.register("cache"), 130).available == 100
    assert asked == []
    assert governor.account(other).allowance == governor.tier(Tier.HOST).used == 50


@pytest.mark.parametrize("short", [0, 3])
def test_a_grant_that_cannot_be_filled_changes_nothing(short: int) -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    victim = governor.register("victim", reclaim=lambda nbytes: short)
    governor.lease_allowance(victim, 50)
    before = numbers(governor, victim)
    refused = governor.grant(cache, 60)
    assert refused == AdmissionRefused(60, 50 + short, 100, Tier.DEVICE, "cache")
    assert numbers(governor, victim) == before
    assert governor.open_grant is None


def test_a_victim_that_lies_or_fails_costs_nobody_anything() -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    liar = governor.register("liar", priority=1, reclaim=lambda nbytes: 10 * nbytes)
    governor.lease_allowance(liar, 60)
    governor.claim_handles(liar, 55)
    governor.pooled(liar, 55)
    before = numbers(governor, liar)
    assert governor.grant(cache, 60).available == 45
    assert numbers(governor, liar) == before

    def broken(nbytes: int) -> int:
        raise RuntimeError("cannot")

    governor.set_reclaim(liar, broken)
    with pytest.raises(RuntimeError, match="cannot"):
        governor.grant(cache, 60)
    assert numbers(governor, liar) == before
    assert isinstance(governor.grant(cache, 40), MappedGrowthGrant)


def test_nobody_leaves_while_a_grant_is_collected() -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    victim = governor.register("victim", priority=0, reclaim=lambda nbytes: nbytes)
    governor.lease_allowance(victim, 50)

    def leave(nbytes: int) -> int:
        with pytest.raises(GrantOverrun):
            governor.unregister(victim)
        return 0

    governor.register("meddler", priority=1, reclaim=leave)
    assert governor.grant(cache, 101).available == 100
    governor.unregister(victim)
    assert numbers(governor)[0] == (0, 0)


def test_leaving_the_block_rolls_back() -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    with contextlib.suppress(KeyError), governor.grant(cache, 60) as grant:
        assert numbers(governor)[0] == (0, 60)
        raise KeyError
    assert numbers(governor)[0] == (0, 0)
    assert not grant.is_open
    with governor.grant(cache, 60) as grant:
        grant.settle(60)
    assert numbers(governor)[0] == (60, 0)


def test_misuse_of_a_grant() -> None:
    governor, other = MemoryGovernor(device=100), MemoryGovernor(device=100)
    cache, stranger = governor.register("cache"), other.register("cache")
    grant = governor.grant(cache, 60)
    too_much = ((61,), (-1,), (60, 61), (10, -1), (0, 5, 6))
    no_handles = ((20, 0), (20, 19), (20, 20, 1))
    no_bytes = ((1.5,), ("1",), (1, 1.0), (1, 1, None))
    for bad in (*too_much, *no_handles, *no_bytes):
        with pytest.raises(GrantOverrun) as caught:
            grant.settle(*bad)
        assert caught.value.numbers["granted"] == 60
    for who in ((other, stranger), (governor, stranger), (other, cache)):
        with pytest.raises(ForeignGrant):
            grant.require(*who)
    grant.settle(1)
    for call in (grant.rollback, lambda: grant.settle(1), lambda: grant.require(governor, cache)):
        with pytest.raises(GrantSettled):
            call()
    for call in (governor.account, governor.unregister, lambda h: governor.grant(h, 1)):
        with pytest.raises(ForeignGrant):
            call(stranger)
    for call in (
        *(governor.unmapped, governor.released, governor.quarantined, governor.claim_handles),
        *(governor.pooled, governor.withdraw),
    ):
        with pytest.raises(ForeignGrant):
            call(stranger, 1)
    with pytest.raises(GrantOverrun):
        governor.unregister(cache)
    governor.unmapped(cache, 1)
    calls = (governor.released, governor.quarantined, governor.pooled)
    for call in (governor.unmapped, governor.withdraw, *(lambda h, n, c=c: c(h, n + 1) for c in calls)):
        with pytest.raises(GrantOverrun):
            call(cache, 1)
    for bad in (-1, 1.5, None):
        with pytest.raises(GrantOverrun):
            governor.released(cache, bad)
        with pytest.raises(InvalidGeometry):
            governor.grant(cache, bad)
    governor.released(cache, 1)
    governor.unregister(cache)
    assert numbers(governor)[0] == (0, 0)


def test_the_release_matrix() -> None:
    """Unmap failed: nothing back. Pooled: mapped back. Released: both back. Release failed: mapped only."""
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    with governor.grant(cache, 40) as grant:
        grant.settle(40)
    governor.unmapped(cache, 30)  # of 40, 10 could not be unmapped
    governor.released(cache, 10)
    governor.quarantined(cache, 5)
    governor.pooled(cache, 15)
    account = governor.account(cache)
    assert (account.mapped, account.owned, account.quarantined, account.pooled) == (10, 30, 5, 15)
    assert governor.withdraw(cache, 15) == 15
    governor.pooled(cache, 15)
    assert account.allowance == numbers(governor)[0][0] == 30


def test_an_allowance_leased_for_good_survives_releases() -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    governor.lease_allowance(cache, 20)
    with governor.grant(cache, 50) as grant:
        assert (grant.sources.own, grant.sources.unassigned) == (20, 30)
        grant.settle(50)
    governor.unmapped(cache, 50)
    governor.released(cache, 50)
    assert governor.account(cache).allowance == 20
    assert isinstance(governor.lease_allowance(cache, 81), AdmissionRefused)
    governor.set_reclaim(cache, lambda nbytes: nbytes)  # it may still choose to give way
    with governor.grant(governor.register("other"), 90) as grant:
        assert governor.account(cache).allowance == 10
        grant.settle(0)
    assert governor.account(cache).allowance == 20
    governor.unregister(cache)
    assert numbers(governor)[0] == (0, 0)


def test_a_thread_with_an_open_grant_is_refused_and_does_not_wait_for_itself() -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    with governor.grant(cache, 10):
        for call in (
            lambda: governor.grant(cache, 1),
            lambda: governor.reserve("x", 1),
            lambda: governor.claim_handles(cache, 1),
            lambda: governor.lease_allowance(cache, 1),
        ):
            with pytest.raises(GrantOpen) as caught:
                call()
            assert caught.value.numbers == {"thread": threading.get_ident()}
        with pytest.raises(GrantOverrun):
            governor.unregister(cache)
    assert numbers(governor)[0] == (0, 0)


def test_ordinary_claims_wait_for_a_grant_and_grants_come_in_the_order_of_asking() -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    first = governor.grant(cache, 90)
    late = governor.register("late")
    results: list[object] = []

    def ask(call) -> threading.Thread:
        thread = threading.Thread(target=lambda: results.append(call()))
        thread.start()
        while len(governor._turns._queue) < len(threads) + 2:
            time.sleep(0.001)
        return thread

    threads: list[threading.Thread] = []

    def grown() -> str:
        with governor.grant(late, 20) as grant:
            grant.settle(20)
        return "grant"

    threads.append(ask(grown))
    threads.append(ask(lambda: governor.reserve("x", 90)))
    assert results == []
    first.rollback()
    for thread in threads:
        thread.join()
    assert results[0] == "grant"
    assert results[1] == AdmissionRefused(90, 80, 100, Tier.DEVICE, "x")


def test_who_waits_too_long_is_refused() -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    results = []

    def impatient() -> None:
        results.append(governor.grant(cache, 1, timeout=0.01))
        results.append(governor.reserve("x", 1, timeout=0.0))
        results.append(governor.claim_handles(cache, 1, timeout=0.0))
        results.append(governor.lease_allowance(cache, 1, timeout=0.0))

    with governor.grant(cache, 10):
        thread = threading.Thread(target=impatient)
        thread.start()
        thread.join()
    assert [refused.reason for refused in results] == ["open_grant"] * 4
    assert isinstance(governor.grant(cache, 1), MappedGrowthGrant)


def test_who_is_interrupted_while_waiting_leaves_no_place_in_the_queue(monkeypatch) -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    caught: list[str] = []

    def interrupted(timeout=None) -> bool:
        raise KeyboardInterrupt

    def claims() -> None:
        for call in (lambda: governor.grant(cache, 1), lambda: governor.reserve("x", 1)):
            try:
                call()
            except KeyboardInterrupt:
                caught.append("interrupt")

    with governor.grant(cache, 10):
        monkeypatch.setattr(governor._lock, "wait", interrupted)
        thread = threading.Thread(target=claims)
        thread.start()
        thread.join()
        monkeypatch.undo()
    assert caught == ["interrupt"] * 2
    with governor.grant(cache, 1, timeout=0.0) as grant:
        assert isinstance(grant, MappedGrowthGrant)


def test_claims_ahead_are_leased_and_refused_like_others() -> None:
    governor = MemoryGovernor(device=100)
    cache = governor.register("cache")
    governor.lease_allowance(cache, 30)
    assert governor.claim_handles(cache, 50) is None
    assert (governor.account(cache).moving, governor.account(cache).pooled) == (50, 0)
    governor.pooled(cache, 50)
    assert governor.account(cache).pooled == 50
    assert numbers(governor)[0] == (50, 0)
    assert governor.claim_handles(cache, 51) == AdmissionRefused(51, 50, 100, Tier.DEVICE, "cache")
    with governor.grant(cache, 60) as grant:
        assert (grant.sources.pooled, grant.sources.own, grant.sources.unassigned) == (50, 0, 10)
        assert governor.withdraw(cache, 20) == 0, "the grant counts on them"
        grant.settle(60)
    assert governor.account(cache).owned == 60


def test_a_forgotten_grant_is_reported(caplog) -> None:
    governor = MemoryGovernor(device=100)
    governor.grant(governor.register("cache"), 10)
    with caplog.at_level(logging.WARNING, logger="paged_kv.vmm"):
        lines = report_open_grants()
    assert any("10 bytes for 'cache'" in line for line in lines)
    assert any("never settled" in record.message for record in caplog.records)
    governor.open_grant.rollback()
    assert not any("10 bytes for 'cache'" in line for line in report_open_grants())


def test_vmm_errors_carry_numbers_and_pickle() -> None:
    error = pickle.loads(pickle.dumps(GrantOverrun("m", given=1)))
    assert isinstance(error, VmmError)
    assert isinstance(error, RuntimeError)
    assert (error.numbers, error.rule, str(error)) == ({"given": 1}, "GrantOverrun", "m")


class GovernorMachine(RuleBasedStateMachine):
    """Two holders and leases, against sums."""

    @initialize(limit=st.integers(20, 60))
    def build(self, limit: int) -> None:
        self.limit = limit
        self.governor = MemoryGovernor(device=limit)
        self.spare = True
        reclaims = (None, lambda nbytes: nbytes if self.spare else 0)
        self.holders = [self.governor.register(str(i), reclaim=r) for i, r in enumerate(reclaims)]
        self.leases: list = []
        self.allowed = [0, 0]
        self.grant: MappedGrowthGrant | None = None

    closed = precondition(lambda self: self.grant is None)
    which = st.integers(0, 1)
    size = st.integers(0, 30)

    @closed
    @rule(size=size)
    def lease(self, size: int) -> None:
        got = self.governor.reserve("x", size)
        if not isinstance(got, AdmissionRefused):
            self.leases.append(got)

    @precondition(lambda self: self.leases)
    @rule()
    def give_back(self) -> None:
        self.leases.pop().release()

    @closed
    @rule(which=which, size=size)
    def allow(self, which: int, size: int) -> None:
        self.governor.lease_allowance(self.holders[which], size)

    @closed
    @rule(which=which, size=size)
    def claim(self, which: int, size: int) -> None:
        if self.governor.claim_handles(self.holders[which], size) is None:
            self.governor.pooled(self.holders[which], size)

    @closed
    @rule(which=which, size=size, spare=st.booleans())
    def ask(self, which: int, size: int, spare: bool) -> None:
        self.spare = spare
        got = self.governor.grant(self.holders[which], size)
        self.grant = got if isinstance(got, MappedGrowthGrant) else None

    @precondition(lambda self: self.grant is not None)
    @rule(data=st.data())
    def settle(self, data) -> None:
        sources = self.grant.sources
        mapped = data.draw(st.integers(0, self.grant.nbytes))
        least = max(0, mapped - sources.pooled)
        owned = data.draw(st.integers(least, sources.fresh)) if least <= sources.fresh else least
        bad = data.draw(st.integers(0, owned - least))
        self.grant.settle(mapped, owned, bad)
        self.grant = None

    @rule(which=which, data=st.data())
    def unmap(self, which: int, data) -> None:
        holder = self.holders[which]
        nbytes = data.draw(st.integers(0, self.governor.account(holder).mapped))
        self.governor.unmapped(holder, nbytes)
        self.governor.pooled(holder, nbytes)

    @rule(which=which, data=st.data(), fails=st.booleans())
    def release(self, which: int, data, fails: bool) -> None:
        holder = self.holders[which]
        nbytes = data.draw(st.integers(0, self.governor.account(holder).pooled))
        allowed = self.governor.withdraw(holder, nbytes)
        held = self.grant.sources.pooled if self.grant and self.grant.holder is holder else 0
        assert allowed == min(nbytes, self.governor.account(holder).pooled + allowed - held)
        nbytes = allowed
        (self.governor.quarantined if fails else self.governor.released)(holder, nbytes)

    @invariant()
    def sums(self) -> None:
        if not hasattr(self, "governor"):
            return
        tier = self.governor.tier(Tier.DEVICE)
        accounts = [self.governor.account(holder) for holder in self.holders]
        leased = sum(lease.nbytes for lease in self.leases)
        assert tier.used == leased + sum(account.allowance for account in accounts)
        assert tier.used + tier.growth_reserved <= tier.limit
        assert tier.growth_reserved == (self.grant.sources.reserved if self.grant else 0)
        for account in accounts:
            assert 0 <= account.mapped + account.quarantined <= account.owned <= account.allowance

    def teardown(self) -> None:
        if getattr(self, "grant", None) is not None:
            self.grant.rollback()


GovernorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestGovernorMachine = GovernorMachine.TestCase
