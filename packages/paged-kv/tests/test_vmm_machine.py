"""Two caches on one device, grown, shrunk, released, captured, replayed and failed in any order."""

import contextlib
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from paged_kv.errors import (
    CaptureInProgress,
    CommitOutOfRange,
    ContentLost,
    DriverCallFailed,
    GrantOpen,
    LayoutRefused,
    RangeQuarantined,
    WorkInFlight,
)
from paged_kv.testing.vmm import VmmStand
from paged_kv.vmm import (
    AdmissionRefused,
    BasePlacement,
    BindingGeometry,
    GraphAction,
    GraphLifecycle,
    Growth,
    KvCacheGeometry,
    KvGrowthController,
    KvLayout,
    MappedStorage,
)

G, CAPACITY, HEADS = 256, 48, 2
PHASES = (Phase.reuse, Phase.generate, Phase.shrink)  # explaining a failure here takes minutes
LAYOUTS = [KvLayout.SEQ_MAJOR, KvLayout.HEAD_MAJOR_BUCKET, KvLayout.HEAD_MAJOR]


class Cache:
    """One cache, its graph, and what it should hold."""

    def __init__(
        self, stand: VmmStand, layout: KvLayout, placement: BasePlacement, stride: int | None
    ) -> None:
        binding = BindingGeometry(layout, CAPACITY, kv_heads=HEADS, head_dim=4)  # 16 bytes a token
        self.storage = MappedStorage(KvCacheGeometry((binding,) * 3), stand.pool, placement, align=16)
        stand.watch(self.storage.arena)
        self.driver, self.layout = stand.driver, layout
        self.graph = GraphLifecycle()
        self.controller = KvGrowthController(self.storage, min_bucket=4, stride=stride, graph=self.graph)
        self.length = 0
        self.captured: tuple | None = None
        self.lost = False

    def token(self, number: int, head: int, token: int) -> np.ndarray:
        stride = self.controller.capacity if self.layout.grows else CAPACITY
        head_major = head * stride + token
        place = head_major if self.layout.is_head_major else token * HEADS + head
        return self.driver.view(self.storage.address_of(number) + place * 8, 8)

    def baked(self) -> tuple:
        """What a captured step has in it."""
        first = [self.storage.address_of(number) for number in range(3)]
        return first, self.controller.capacity if self.layout.grows else CAPACITY

    def write(self, start: int, stop: int) -> None:
        for token in range(start, stop):
            for number in range(3):
                for head in range(HEADS):
                    self.token(number, head, token)[:] = 1 + (7 * token + 3 * number + head) % 250

    def verify(self) -> None:
        if self.lost:
            return
        capacity, length = self.controller.capacity, self.length
        stride = capacity if self.layout.grows else CAPACITY
        for number in range(3 if capacity else 0):
            base = self.storage.address_of(number)
            for head in range(HEADS):
                if self.layout.is_head_major:
                    there = self.driver.view(base + head * stride * 8, capacity * 8).reshape(capacity, 8)
                else:
                    there = self.driver.view(base, capacity * HEADS * 8).reshape(capacity, HEADS, 8)[:, head]
                expected = 1 + (7 * np.arange(length) + 3 * number + head) % 250
                assert (there[:length] == expected[:, None]).all()
                assert not there[length:].any()


class Walk:
    """Two caches, one pool, a rival, and one operation after another. `choose` is where choices come from."""

    def __init__(self, choose) -> None:
        self.choose = choose
        limit, retain = choose.one((10, 16, 60)), choose.one((0, 4))
        placement, stride = choose.one(list(BasePlacement)), choose.one((None, 8))
        self.stand = VmmStand(G, limit=limit * G, retain=retain, backed=True)
        self.caches = [Cache(self.stand, choose.one(LAYOUTS), placement, stride) for _ in range(2)]
        self.leases: list = []
        self.stand.leased = lambda: sum(lease.nbytes for lease in self.leases)
        self.stand.driver.hold(1)
        self.rival = self.stand.governor.register("rival")
        self.seen: set[str] = set()

    OPERATIONS = (
        *(("grow",) * 6 + ("step",) * 6 + ("ahead", "shrink", "shrink", "release", "finish", "finish")),
        *("prefill", "trim", "lease", "give_back", "give_back", "rival_grant", "beyond"),
    )

    def act(self) -> None:
        """Do something, and compare everything."""
        self.cache = self.choose.one(self.caches)
        self.tokens = self.choose.between(0, CAPACITY)
        getattr(self, self.choose.one(self.OPERATIONS))()
        self.verify()

    def verify(self) -> None:
        self.stand.assert_consistent()
        for cache in self.caches:
            cache.verify()

    @contextlib.contextmanager
    def failing(self):
        """Perhaps let a driver call fail, or one and all that follow."""
        self.fault = self.choose.one((False, False, True))
        if self.fault:
            first, on = self.choose.between(0, 20), self.choose.one((False, False, True))
            self.stand.driver.arm(lambda number, name: number == first or (on and number > first))
        try:
            yield
        finally:
            self.stand.driver.arm(None)

    def grow(self) -> None:
        cache, tokens = self.cache, self.tokens
        if cache.lost:
            return
        before, counted = cache.controller.capacity, cache.controller.counters
        try:
            with self.failing():
                growth = cache.controller.ensure(tokens, stream=1)
        except ContentLost:
            cache.lost = True
        except (DriverCallFailed, RangeQuarantined) as error:
            assert cache.controller.capacity == before
            assert cache.controller.counters == counted
            self.seen.add(error.rule)
        else:
            self.seen.add(type(growth).__name__)
            if isinstance(growth, Growth):
                assert cache.controller.capacity == growth.new >= max(tokens, before + 1)
                self.judged(cache, growth, counted.invalidations)
            elif isinstance(growth, AdmissionRefused):
                assert cache.controller.capacity == before
                assert growth.available < growth.needed
            else:
                assert tokens <= before

    def judged(self, cache: Cache, growth: Growth, invalidations: int) -> None:
        assert growth.decision.keep == (cache.layout is KvLayout.SEQ_MAJOR and invalidations > 0)
        self.seen.add(f"keep {growth.decision.keep}")
        if not growth.decision.keep:
            assert cache.graph.action is GraphAction.WARM
            cache.captured = None

    def ahead(self) -> None:
        before = self.cache.controller.capacity
        with self.failing(), contextlib.suppress(DriverCallFailed, RangeQuarantined):
            self.cache.controller.commit_ahead(self.tokens, stream=2)
        assert self.cache.controller.capacity == before

    def shrink(self) -> None:
        cache, tokens = self.cache, self.tokens
        before = cache.controller.capacity
        try:
            with self.failing():
                outcome = cache.controller.shrink(min(tokens, before))
        except (WorkInFlight, DriverCallFailed) as error:
            assert cache.controller.capacity == before
            busy = cache.storage.arena.fence.busy()  # or was, when an event could not be recorded
            assert self.fault or busy or self.stand.driver.undone(1)
            self.seen.add(f"shrink {error.rule}")
        except LayoutRefused:
            assert cache.layout is KvLayout.HEAD_MAJOR_BUCKET
        else:
            assert cache.controller.capacity == min(tokens, before)
            self.seen.add(f"shrink {outcome.complete}")
            cache.length = min(cache.length, tokens)
            self.cut(cache)

    def cut(self, cache: Cache) -> None:
        cache.captured = cache.captured if cache.layout is KvLayout.SEQ_MAJOR else None

    def release(self) -> None:
        self.cache.storage.arena.wait_idle()
        self.cache.controller.shrink(0)
        self.cache.length, self.cache.lost = 0, False
        self.cut(self.cache)

    def step(self) -> None:
        cache = self.cache
        if cache.lost or cache.length >= cache.controller.capacity:
            return
        with cache.graph.step() as action:
            self.seen.add(action)
            if action is GraphAction.CAPTURE:
                self.capture(cache)
            elif action is GraphAction.REPLAY:
                assert cache.captured == cache.baked(), "a replay finds what it has baked in"
            cache.write(cache.length, cache.length + 1)
            arena = cache.storage.arena
            self.stand.driver.launch(1, arena.address, arena.placement.total_bytes)
            arena.fence.record(1)
        cache.length += 1

    def capture(self, cache: Cache) -> None:
        with self.stand.gate.capture():
            self.stand.driver.begin_capture(1)
            assert cache.controller.ensure(cache.controller.capacity) is None
            for call in (lambda: cache.controller.shrink(0), self.stand.pool.trim):
                with pytest.raises(CaptureInProgress):
                    call()
            if cache.controller.capacity < CAPACITY:
                with pytest.raises(CaptureInProgress):
                    cache.controller.ensure(CAPACITY)
            self.stand.driver.end_capture(1)
        cache.captured = cache.baked()

    def finish(self) -> None:
        self.stand.driver.finish(1)

    def prefill(self) -> None:
        with self.failing(), contextlib.suppress(DriverCallFailed):
            self.stand.pool.prefill(self.choose.between(0, 8))

    def trim(self) -> None:
        with self.failing():
            self.stand.pool.trim(self.choose.between(0, 3))

    def lease(self) -> None:
        got = self.stand.governor.reserve("other", self.choose.between(1, 8) * G)
        if not isinstance(got, AdmissionRefused):
            self.leases.append(got)

    def give_back(self) -> None:
        if self.leases:
            self.leases.pop().release()

    def rival_grant(self) -> None:
        """While another holder's grant is open, this thread grows only into what is committed already."""
        got = self.stand.governor.grant(self.rival, self.choose.between(0, 12) * G)
        if isinstance(got, AdmissionRefused):
            return
        with got:
            cache = self.cache
            before, counted = cache.controller.capacity, cache.controller.counters
            if before == CAPACITY or cache.lost:
                return
            try:
                growth = cache.controller.ensure(CAPACITY, stream=1)
            except (GrantOpen, RangeQuarantined) as error:
                assert cache.controller.capacity == before
                self.seen.add(f"rival {error.rule}")
            else:
                assert growth.billed_bytes == 0, "what needs no memory needs no grant"
                self.judged(cache, growth, counted.invalidations)

    def beyond(self) -> None:
        with pytest.raises(CommitOutOfRange):
            self.cache.controller.ensure(CAPACITY + 1)

    def end(self) -> None:
        for cache in self.caches:
            cache.storage.close()
        while self.leases:
            self.leases.pop().release()
        self.stand.pool.close()
        self.stand.assert_consistent()
        stuck = self.stand.pool.num_quarantined + self.stand.pool.num_out
        assert self.stand.driver.num_handles == stuck, "only what could not be given back is left"


class DrawnChoices:
    """Choices that hypothesis makes, and can shrink."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def one(self, items):
        return self.data.draw(st.sampled_from(list(items)))

    def between(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))


class SeededChoices:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, items):
        return self.random.choice(list(items))

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


class VmmMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def build(self, data) -> None:
        self.walk = Walk(DrawnChoices(data))

    @rule(data=st.data())
    def act(self, data) -> None:
        self.walk.choose.data = data
        self.walk.act()

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.end()


VmmMachine.TestCase.settings = settings(
    phases=PHASES,
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestVmmMachine = VmmMachine.TestCase


def test_long_walks_meet_everything() -> None:
    seen: set[str] = set()
    for seed in range(100):
        walk = Walk(SeededChoices(seed))
        for _ in range(120):
            walk.act()
        walk.end()
        seen |= walk.seen
    assert {"Growth", "NoneType", "AdmissionRefused", "DriverCallFailed", "RangeQuarantined"} <= seen
    assert {"keep True", "keep False", "shrink True", "shrink False", "shrink WorkInFlight"} <= seen
    assert {"warm", "capture", "replay", "rival GrantOpen"} <= seen
