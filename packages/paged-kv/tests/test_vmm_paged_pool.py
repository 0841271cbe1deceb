"""A page is free only while there is memory behind it, and no page moves when the pool does."""

import contextlib
import random
import threading

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from paged_kv import (
    CacheKey,
    CapacityDeferred,
    KVCacheManager,
    PageGeometry,
    PoolShrinkRefused,
    PrefixChain,
    StepTransaction,
    UnserviceableRequest,
)
from paged_kv.errors import (
    CaptureInProgress,
    CommitOutOfRange,
    DriverCallFailed,
    InvalidGeometry,
    InvalidLength,
    PageNotOwned,
    RangeQuarantined,
    StepOpen,
    WorkInFlight,
    WrongThread,
)
from paged_kv.testing.vmm import VmmStand
from paged_kv.vmm import (
    AdmissionRefused,
    BasePlacement,
    KvCacheGeometry,
    KvLayout,
    MappedStorage,
    PagedPool,
    paged_cache_geometry,
)

G = 4096
PAGES = PageGeometry(64, 16)  # a page of one tensor: 16 * 2 * 16 * 2 = 1 KiB


class Scene:
    def __init__(
        self, first: int = 9, *, limit: int = 1 << 30, pages: PageGeometry = PAGES, **options
    ) -> None:
        self.stand = VmmStand(G, backed=True, limit=limit)
        geometry = paged_cache_geometry(pages, layers=2, kv_heads=2, head_dim=16)
        self.kv = KVCacheManager(pages, initial_blocks=pages.first_page, max_sequences=8, **options)
        self.held = MappedStorage(geometry, self.stand.pool)
        self.stand.watch(self.held.arena)
        self.paged = PagedPool(self.kv, self.held)
        if first:
            self.paged.grow(first)

    def run(self, row, tokens: int) -> None:
        with self.kv.begin_step(row, tokens) as step:
            step.commit()
        self.kv.complete(step.epoch)

    def check(self) -> None:
        self.kv.check("full")
        self.stand.assert_consistent()
        for number in range(4):
            base = self.held.address_of(number)
            if self.kv.pool_blocks:
                self.stand.driver.view(base, self.kv.pool_blocks * 1_024)


def test_growing_adds_free_pages_and_moves_none() -> None:
    scene = Scene()
    kv, paged = scene.kv, scene.paged
    addresses = [scene.held.address_of(number) for number in range(4)]
    row = kv.create(1)
    scene.run(row, 120)
    cells = kv.view().cells[0].tolist()
    assert isinstance(kv.begin_step(row, 20), CapacityDeferred)
    done = paged.grow(33, stream=3)
    assert (done.old, done.new, done.memory.billed_bytes) == (9, 33, 4 * 6 * G)
    assert [scene.held.address_of(number) for number in range(4)] == addresses
    assert kv.view().cells[0].tolist() == cells
    assert kv.stats().num_pages_free == 24
    assert kv.stats().num_pages_uncommitted == 64 - 33
    scene.run(row, 300)
    assert max(kv.view().cells[0]) > 8
    scene.check()
    assert isinstance(kv.begin_step(row, 64 * 16), UnserviceableRequest), "beyond what is reserved"


def test_no_page_is_free_before_its_memory_is_there() -> None:
    scene = Scene(first=0)
    assert scene.kv.stats().num_pages_free == 0
    assert isinstance(scene.kv.begin_step(scene.kv.create(1), 1), CapacityDeferred)
    assert isinstance(scene.kv.admit(16), CapacityDeferred)
    seen = []

    def watch(number: int, name: str) -> bool:
        seen.append((name, scene.kv.stats().num_pages_free))
        return False

    scene.stand.driver.arm(watch)
    scene.paged.grow(5)
    assert {free for _, free in seen} == {0}
    assert seen[-1][0] == "record_event"
    assert scene.kv.stats().num_pages_free == 4
    scene.stand.driver.arm(lambda number, name: name == "set_access")
    with pytest.raises(DriverCallFailed):
        scene.paged.grow(20)
    scene.stand.driver.arm(None)
    assert (scene.paged.num_blocks, scene.kv.stats().num_pages_free) == (5, 4)
    scene.check()


def test_shrinking_takes_free_pages_from_the_end_only() -> None:
    scene = Scene(first=33)
    kv, paged = scene.kv, scene.paged
    rows = kv.create(3)
    for row, tokens in zip(rows, (64, 16, 48), strict=True):
        scene.run(row, tokens)  # pages 1-4, 5, 6-8
    kv.release(rows[1])
    refused = paged.shrink(5)
    assert refused == PoolShrinkRefused(requested=5, lowest=9, live=3, fenced=0, promised=0)
    before = scene.held.arena.mapped_bytes
    done = paged.shrink(refused.lowest)
    assert (done.old, done.new) == (33, 9)
    assert done.memory.refunded_bytes == before - scene.held.arena.mapped_bytes == 4 * 6 * G
    scene.check()
    with kv.begin_step(rows[0], 1) as step:
        with pytest.raises(StepOpen):
            paged.shrink(9)
        step.commit()
    kv.release(rows[2])
    refused = paged.shrink(6)
    assert (refused.live, refused.fenced, refused.lowest) == (0, 3, 9)
    kv.complete(step.epoch)
    assert paged.shrink(6).new == 6
    scene.check()


def test_promised_pages_stay() -> None:
    scene = Scene(first=33)
    scene.kv.admit(16 * 20)
    refused = scene.paged.shrink(10)
    assert refused == PoolShrinkRefused(requested=10, lowest=21, live=0, fenced=0, promised=20)
    assert scene.paged.shrink(21).new == 21
    assert scene.paged.shrink(21).new == 21, "nothing to do is no refusal"
    scene.check()


def test_cached_content_beyond_the_end_is_forgotten_and_told() -> None:
    events = []
    scene = Scene(first=33, event_sinks=[lambda event: events.append((event.kind, event.page))])
    chain = PrefixChain(CacheKey(model="m", dtype="float16", layout="SEPARATE"), 16)
    chain.extend(range(65))
    row = scene.kv.create(1)
    scene.run(row, 65)
    scene.kv.register(row[0], chain)
    scene.kv.release(row)
    assert scene.paged.shrink(3).new == 3
    assert events[4:] == [("removed", 3), ("removed", 4)]
    hit = scene.kv.lookup_and_pin(chain)
    assert hit.pages.tolist() == [1, 2]
    scene.check()


def test_a_shrink_under_work_in_flight_forgets_nothing() -> None:
    scene = Scene(first=33)
    chain = PrefixChain(CacheKey(model="m", dtype="float16", layout="SEPARATE"), 16)
    chain.extend(range(65))
    row = scene.kv.create(1)
    scene.run(row, 65)
    scene.kv.register(row[0], chain)
    scene.kv.release(row)
    scene.stand.driver.hold(1)
    scene.stand.driver.launch(1)
    scene.held.arena.fence.record(1)
    before = scene.kv.digest()
    with pytest.raises(WorkInFlight):
        scene.paged.shrink(3)
    assert scene.kv.digest() == before
    assert scene.kv.lookup_and_pin(chain).pages.tolist() == [1, 2, 3, 4]
    scene.stand.driver.finish(1)
    scene.check()


def test_a_quarantined_page_stays_so_when_the_end_passes_it() -> None:
    scene = Scene(first=33)
    scene.kv.quarantine(20)
    assert scene.paged.shrink(10).new == 10
    scene.check()
    scene.paged.grow(33)
    assert scene.kv.stats().num_pages_quarantined == 1
    assert scene.kv.stats().num_pages_free == 31
    scene.check()
    scene.paged.shrink(10)
    with pytest.raises(PageNotOwned):
        scene.kv.quarantine(40)


def test_a_refusal_of_memory_is_a_value() -> None:
    scene = Scene(first=9, limit=4 * 3 * G)
    refused = scene.paged.grow(30)
    assert isinstance(refused, AdmissionRefused)
    assert scene.paged.commit_ahead(30) == refused
    assert scene.paged.num_blocks == 9
    scene.check()


def test_memory_committed_ahead_by_another_thread() -> None:
    scene = Scene()
    thread = threading.Thread(target=lambda: scene.paged.commit_ahead(40, stream=2))
    thread.start()
    thread.join()
    assert scene.paged.num_blocks == 9
    scene.stand.driver.log.clear()
    assert scene.paged.grow(40, stream=1).memory.billed_bytes == 0
    assert scene.stand.driver.log == [("stream_wait_event", (1, scene.held.arena._ready))]
    scene.check()


def test_bad_input_changes_nothing() -> None:
    scene = Scene()
    kv, paged = scene.kv, scene.paged
    before = kv.digest()
    for bad in (8, 65, 1 << 20):
        with pytest.raises(CommitOutOfRange) as caught:
            paged.grow(bad)
        assert caught.value.numbers == {"needed": bad, "minimum": 9, "maximum": 64}
    for bad in (-1, 1.5, None, True):
        for call in (paged.grow, paged.commit_ahead):
            with pytest.raises(InvalidGeometry):
                call(bad)
    for bad in (-1, 0, 10, 65, 1.5, None, True):
        with pytest.raises(InvalidLength):
            paged.shrink(bad)
    for bad in (8, 65, "9"):
        with pytest.raises(InvalidLength):
            kv.grow_pool(bad)
    for blocks in (0, 65, 1.0):
        with pytest.raises(InvalidGeometry):
            KVCacheManager(PAGES, initial_blocks=blocks)
    with scene.stand.gate.capture():
        for call in (lambda: paged.grow(20), lambda: paged.shrink(5)):
            with pytest.raises(CaptureInProgress):
                call()
    scene.stand.driver.hold(1)
    scene.stand.driver.launch(1)
    scene.held.arena.fence.record(1)
    with pytest.raises(WorkInFlight):
        paged.shrink(5)
    caught_elsewhere = []

    def elsewhere() -> None:
        try:
            paged.grow(20)
        except WrongThread as error:
            caught_elsewhere.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught_elsewhere) == 1
    assert kv.digest() == before
    assert scene.held.arena.mapped_bytes == 4 * 3 * G
    scene.check()


def test_tensors_that_are_not_the_pools() -> None:
    stand = VmmStand(G)
    right = paged_cache_geometry(PAGES, layers=1, kv_heads=1, head_dim=8)
    wrong = KvCacheGeometry.uniform(KvLayout.HEAD_MAJOR, layers=1, kv_heads=1, head_dim=8, capacity=1_024)
    other = paged_cache_geometry(PageGeometry(32, 16), layers=1, kv_heads=1, head_dim=8)
    empty = KVCacheManager(PAGES, initial_blocks=1)
    for geometry in (wrong, other):
        with pytest.raises(InvalidGeometry):
            PagedPool(empty, MappedStorage(geometry, stand.pool))
    with pytest.raises(InvalidGeometry):
        PagedPool(KVCacheManager(PAGES), MappedStorage(right, stand.pool))
    paged = PagedPool(empty, MappedStorage(right, stand.pool, BasePlacement.PACKED))
    stand.watch(paged.storage.arena)
    assert paged.grow(64).new == 64
    paged.close()
    stand.assert_consistent()


def test_a_pool_without_a_null_page_can_be_empty() -> None:
    pages = PageGeometry(16, 16, null_page=False)
    scene = Scene(first=0, pages=pages)
    assert scene.paged.num_blocks == 0
    scene.paged.grow(4)
    row = scene.kv.create(1)
    scene.run(row, 64)
    assert scene.kv.view().cells[0, :4].tolist() == [0, 1, 2, 3]
    scene.kv.release(row)
    assert scene.paged.shrink(0).new == 0
    assert scene.held.arena.mapped_bytes == 0
    scene.check()


def test_a_granule_that_could_not_be_unmapped_is_not_grown_over() -> None:
    scene = Scene(first=33)
    scene.stand.driver.arm(lambda number, name: name == "unmap")
    done = scene.paged.shrink(5)
    scene.stand.driver.arm(None)
    assert not done.memory.complete
    assert scene.paged.num_blocks == 5
    with pytest.raises(RangeQuarantined):
        scene.paged.grow(33)
    assert scene.paged.num_blocks == 5
    scene.check()


def test_an_interrupted_shrink_leaves_no_page_without_memory() -> None:
    scene = Scene(first=33)

    def interrupt(number: int, name: str) -> bool:
        if name == "unmap" and number > 5:
            raise KeyboardInterrupt
        return False

    scene.stand.driver.arm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        scene.paged.shrink(5)
    scene.stand.driver.arm(None)
    assert scene.paged.num_blocks == 5
    scene.check()
    scene.paged.grow(33)
    scene.check()


def test_new_memory_is_zero_and_a_page_that_kept_its_granule_keeps_its_content() -> None:
    scene = Scene(first=7)  # four pages a granule: pages 4 to 6 lie in the second
    base = scene.held.address_of(0)
    scene.stand.driver.view(base, 7 * 1_024)[:] = 7
    scene.paged.shrink(5)
    scene.paged.grow(12)
    assert (scene.stand.driver.view(base, 7 * 1_024) == 7).all()
    assert not scene.stand.driver.view(base + 8 * 1_024, 4 * 1_024).any()


def test_a_shrink_that_meets_new_work_puts_the_pages_back() -> None:
    scene = Scene(first=33)
    arena = scene.held.arena
    scene.stand.driver.hold(1)
    shrink = scene.held.shrink

    def launched_meanwhile(tokens: int):
        scene.stand.driver.launch(1)
        arena.fence.record(1)
        return shrink(tokens)

    scene.held.shrink = launched_meanwhile
    with pytest.raises(WorkInFlight):
        scene.paged.shrink(9)
    assert (scene.paged.num_blocks, scene.kv.stats().num_pages_free) == (33, 32)
    scene.stand.driver.finish(1)
    scene.check()


class PoolWalk:
    """An engine that resizes its pool at any moment, with failing driver calls, captures and replays.

    `choose` is a `random.Random`, or hypothesis' stand-in for one.
    """

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.pages = PageGeometry(24, 16, null_page=choose.random() < 0.5)
        self.stand = VmmStand(G, backed=True, retain=choose.choice([0, 3]))
        geometry = paged_cache_geometry(self.pages, layers=1, kv_heads=2, head_dim=16)
        self.held = MappedStorage(geometry, self.stand.pool, choose.choice(list(BasePlacement)))
        self.stand.watch(self.held.arena)
        self.kv = KVCacheManager(self.pages, initial_blocks=self.pages.first_page, max_sequences=4)
        self.paged = PagedPool(self.kv, self.held)
        self.paged.grow(self.pages.first_page)  # the null page, which padding reads
        self.rows: list[int] = []
        self.step: StepTransaction | None = None
        self.epochs: list[int] = []
        self.stand.driver.hold(1)
        self.seen: set[str] = set()

    def act(self) -> None:
        """Do something, and compare everything."""
        operations = [self.grow, self.ahead, self.complete, self.complete, self.capture]
        if self.step is None:
            operations += [self.shrink] * 3
            operations += [self.begin] * 4 + [self.release] if self.rows else []
        else:
            operations += [self.replay] * 4
        operations += [self.create] * 2 if len(self.rows) < 4 else []
        self.choose.choice(operations)()
        self.verify()

    def blocks(self) -> int:
        return self.choose.randint(0, 24)

    @contextlib.contextmanager
    def failing(self):
        """Perhaps let a driver call fail, or one and all that follow."""
        self.fault = self.choose.random() < 0.3
        if self.fault:
            first, on = self.choose.randint(0, 20), self.choose.random() < 0.3
            self.stand.driver.arm(lambda number, name: number == first or (on and number > first))
        try:
            yield
        finally:
            self.stand.driver.arm(None)

    def grow(self) -> None:
        before, wanted = self.paged.num_blocks, max(self.blocks(), self.paged.num_blocks)
        try:
            with self.failing():
                assert self.paged.grow(wanted).new == wanted
        except (DriverCallFailed, RangeQuarantined) as error:
            assert self.paged.num_blocks == before
            self.seen.add(error.rule)

    def shrink(self) -> None:
        before = self.paged.num_blocks
        end = min(max(self.blocks(), self.pages.first_page), before)
        try:
            with self.failing():
                done = self.paged.shrink(end)
        except (WorkInFlight, DriverCallFailed) as error:
            assert self.paged.num_blocks == before
            assert self.fault or self.held.arena.fence.busy() or self.stand.driver.undone(1)
            self.seen.add(f"shrink {error.rule}")
        else:
            self.seen.add(type(done).__name__)
            if isinstance(done, PoolShrinkRefused):
                assert end < done.lowest <= before
                assert self.paged.num_blocks == before
                if not self.stand.driver.undone(1):
                    assert self.paged.shrink(done.lowest).new == done.lowest
            else:
                assert self.paged.num_blocks == end

    def ahead(self) -> None:
        with self.failing(), contextlib.suppress(DriverCallFailed, RangeQuarantined):
            self.paged.commit_ahead(self.blocks(), stream=2)

    def create(self) -> None:
        self.rows += self.kv.create(1).tolist()

    def begin(self) -> None:
        step = self.kv.begin_step([self.choose.choice(self.rows)], self.choose.randint(1, 60))
        self.step = step if isinstance(step, StepTransaction) else None
        self.seen.add(type(step).__name__)

    def replay(self) -> None:
        plan = self.step.plan()
        for slot in plan.slot_mapping.tolist():
            for number in range(2):  # a store to a page without memory is seen here
                self.stand.driver.view(self.held.address_of(number) + slot * 64, 64)[:] = 7
        self.stand.driver.launch(1)
        self.held.arena.fence.record(1)
        if self.choose.random() < 0.8:
            self.step.commit()
            self.epochs.append(self.step.epoch)
        else:
            self.step.rollback()
        self.step = None

    def complete(self) -> None:
        self.held.arena.wait_idle()
        if self.epochs:
            self.kv.complete(self.epochs[-1])
            self.epochs.clear()

    def release(self) -> None:
        row = self.choose.choice(self.rows)
        self.rows.remove(row)
        self.kv.release(row)

    def capture(self) -> None:
        before = self.kv.digest()
        with self.stand.gate.capture():
            self.stand.driver.begin_capture(1)
            for call in (
                lambda: self.paged.grow(max(self.blocks(), self.paged.num_blocks)),
                lambda: self.paged.shrink(self.pages.first_page),
            ):
                with pytest.raises(CaptureInProgress):
                    call()
            self.stand.driver.end_capture(1)
        assert self.kv.digest() == before

    def verify(self) -> None:
        self.kv.check("full")
        self.stand.assert_consistent()
        for number in range(2):  # every page that is there has memory
            if self.kv.pool_blocks:
                self.stand.driver.view(self.held.address_of(number), self.kv.pool_blocks * 1_024)

    def end(self) -> None:
        self.paged.close()
        self.stand.pool.close()
        self.stand.assert_consistent()
        stuck = self.stand.pool.num_quarantined + self.stand.pool.num_out
        assert self.stand.driver.num_handles == stuck, "only what could not be given back is left"


class PagedPoolMachine(RuleBasedStateMachine):
    @initialize(choose=st.randoms(use_true_random=False))
    def build(self, choose) -> None:
        self.walk = PoolWalk(choose)

    @rule(choose=st.randoms(use_true_random=False))
    def act(self, choose) -> None:
        self.walk.choose = choose
        self.walk.act()

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.end()


PagedPoolMachine.TestCase.settings = settings(
    phases=(Phase.reuse, Phase.generate, Phase.shrink),
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPagedPoolMachine = PagedPoolMachine.TestCase


def test_long_walks_meet_everything() -> None:
    seen: set[str] = set()
    for seed in range(40):
        walk = PoolWalk(random.Random(seed))
        for _ in range(100):
            walk.act()
        walk.end()
        seen |= walk.seen
    assert {"PoolResized", "PoolShrinkRefused", "shrink WorkInFlight", "DriverCallFailed"} <= seen
    assert {"RangeQuarantined", "StepTransaction", "CapacityDeferred"} <= seen
