"""Whichever driver call fails, and whichever call of taking it back fails too, the books stay right.

Each operation is run once to count its driver calls, then again with the n-th failing for every n, and with
every pair failing: the second of a pair is often a call that takes something back. After each, V1 to V6 hold
against the fake driver's own map. Then the fault is gone and the operation is tried again.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from paged_kv import CapacityDeferred, KVCacheManager, PageGeometry
from paged_kv.errors import ContentLost, DriverCallFailed, RangeQuarantined, VmmError
from paged_kv.testing.vmm import VmmStand
from paged_kv.vmm import (
    BasePlacement,
    BindingGeometry,
    KvCacheGeometry,
    KvGrowthController,
    KvLayout,
    MappedStorage,
    PagedPool,
    Placement,
    ReallocStorage,
    VirtualArena,
    paged_cache_geometry,
)

G = 256


class Scene:
    """One operation about to happen, and what must not change when it fails."""

    stand: VmmStand

    def run(self) -> object:
        raise NotImplementedError

    def state(self) -> object:
        """Everything observable that a failure must leave."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class ArenaScene(Scene):
    """Packed bindings, so that neighbours share granules; some handles wait in the pool."""

    def __init__(self, ready: int, before: int, pooled: int, retain: int = 0) -> None:
        self.stand = VmmStand(G, retain=retain, backed=True)
        binding = BindingGeometry(KvLayout.SEQ_MAJOR, 40, kv_heads=1, head_dim=8)  # 640 bytes
        placed = Placement.of(KvCacheGeometry((binding,) * 2), G, BasePlacement.PACKED, align=16, phase=48)
        self.arena = self.stand.watch(VirtualArena(placed, self.stand.pool))
        self.arena.commit(self.arena.planner.plan(self.arena.table, before), stream=1)
        self.stand.pool.prefill(pooled)
        self.ready = ready

    def state(self) -> object:
        table, pool = self.arena.table, self.stand.pool
        return (
            table.claimed.tolist(),
            table.refs.tolist(),
            dict(table.handles),
            table.poisoned.tolist(),
            sorted(pool._free),
            self.stand.governor.account(self.stand.holder),
            self.stand.governor.tier(self.stand.holder.tier),
            self.arena.is_closed,
        )

    def close(self) -> None:
        self.arena.close()
        self.stand.pool.close()


class Commit(ArenaScene):
    def run(self) -> object:
        return self.arena.commit(self.arena.planner.plan(self.arena.table, self.ready), stream=2)


class Decommit(ArenaScene):
    def run(self) -> object:
        return self.arena.decommit(self.arena.planner.shrink_plan(self.arena.table, self.ready))


class Prefill(ArenaScene):
    def run(self) -> object:
        return self.stand.pool.prefill(self.ready)


class Trim(ArenaScene):
    def run(self) -> object:
        return self.stand.pool.trim(self.ready)


class Open(ArenaScene):
    def run(self) -> object:
        self.second = self.stand.watch(VirtualArena(self.arena.placement, self.stand.pool))
        return self.second

    def close(self) -> None:
        if hasattr(self, "second"):
            self.second.close()
        super().close()


class CacheScene(Scene):
    """A cache whose tokens are known, about to change its capacity."""

    def __init__(
        self, layout: KvLayout, *, realloc: bool = False, first: int = 8, then: int = 9, capacity: int = 64
    ) -> None:
        self.stand = VmmStand(G, backed=True)
        self.geometry = KvCacheGeometry((BindingGeometry(layout, capacity, kv_heads=3, head_dim=8),) * 2)
        if realloc:
            self.held = ReallocStorage(self.geometry, self.stand.pool)
            self.stand.leased = lambda: self.held.leased_bytes
        else:
            self.held = MappedStorage(self.geometry, self.stand.pool, BasePlacement.PACKED, align=16)
            self.stand.watch(self.held.arena)
        self.controller = KvGrowthController(self.held, min_bucket=8)
        self.controller.ensure(first)
        self.then = then
        self.written = first
        self.tensors(self.controller.capacity, lambda view, number: self.fill(view, number))

    def tensors(self, capacity: int, act: Callable) -> list:
        done = []
        for number, binding in enumerate(self.geometry.bindings):
            shape = binding.physical_shape(capacity)
            count = int(np.prod(shape)) * binding.element_size
            if isinstance(self.held, ReallocStorage):
                if binding.layout.is_head_major:
                    shape = (binding.batch, binding.kv_heads, capacity, binding.head_dim)
                else:
                    shape = (binding.batch, capacity, binding.kv_heads, binding.head_dim)
                count = int(np.prod(shape)) * binding.element_size
            if binding.layout is KvLayout.SEQ_MAJOR and not isinstance(self.held, ReallocStorage):
                shape = (1, capacity, binding.kv_heads, binding.head_dim)
                count = int(np.prod(shape)) * binding.element_size
            view = self.stand.driver.view(self.held.address_of(number), count).view(np.uint16).reshape(shape)
            done.append(act(view if not binding.layout.is_head_major else view.transpose(0, 2, 1, 3), number))
        return done

    def fill(self, view: np.ndarray, number: int) -> None:
        values = np.random.default_rng(number).integers(1, 60_000, (1, self.written, *view.shape[2:]))
        view[:, : self.written] = values

    def tokens(self) -> list[bytes]:
        """What every row and head holds, in order of tokens, whatever the layout; zero beyond."""
        capacity = self.controller.capacity

        def read(view: np.ndarray, number: int) -> bytes:
            assert not view[:, self.written : capacity].any(), "what is new is zero"
            return view[:, : self.written].tobytes()

        return self.tensors(capacity, read)

    def state(self) -> object:
        counters = self.controller.counters
        addresses = [self.held.address_of(number) for number in range(2)]
        return self.tokens(), self.controller.capacity, addresses, counters

    def run(self) -> object:
        return self.controller.ensure(self.then, stream=3)

    def close(self) -> None:
        self.held.close()
        self.stand.pool.close()


class Shrink(CacheScene):
    def run(self) -> object:
        return self.controller.shrink(self.then)

    def state(self) -> object:
        return self.controller.capacity, self.controller.counters


class Regrow(CacheScene):
    """Growing over what was written before and given up: it must come back zero."""

    def __init__(self, layout: KvLayout) -> None:
        super().__init__(layout, first=30, then=30)
        self.controller.shrink(3)
        self.written = 3


class Ahead(CacheScene):
    def run(self) -> object:
        return self.controller.commit_ahead(30, stream=4)


class Pool(Scene):
    """A page pool about to move its end; a row holds a page."""

    def __init__(self, to: int, *, ahead: int = 0) -> None:
        self.stand = VmmStand(G, backed=True)
        pages = PageGeometry(32, 16)
        geometry = paged_cache_geometry(pages, layers=2, kv_heads=1, head_dim=4, element_size=1)
        self.kv = KVCacheManager(pages, max_sequences=4, initial_blocks=1)
        held = MappedStorage(geometry, self.stand.pool, BasePlacement.PACKED, align=16)
        self.stand.watch(held.arena)
        self.paged = PagedPool(self.kv, held)
        self.paged.grow(12, stream=1)
        self.row = self.kv.create(1)
        with self.kv.begin_step(self.row, 30) as step:
            step.commit()
        self.kv.complete(step.epoch)
        if ahead:
            self.paged.commit_ahead(ahead, stream=2)
        self.to = to

    def run(self) -> object:
        return self.paged.grow(self.to) if self.to > self.paged.num_blocks else self.paged.shrink(self.to)

    def state(self) -> object:
        pages = self.kv.stats()
        return self.paged.num_blocks, pages.num_pages_free, pages.num_pages_uncommitted

    def close(self) -> None:
        self.kv.check("full")
        assert not isinstance(self.kv.begin_step(self.row, 1), CapacityDeferred)
        self.paged.close()
        self.stand.pool.close()


HEAD, SEQ = KvLayout.HEAD_MAJOR_BUCKET, KvLayout.SEQ_MAJOR
SCENES: dict[str, Callable[[], Scene]] = {
    "first commit": lambda: Commit(40, 0, 0),
    "growth on shared granules": lambda: Commit(25, 5, 0),
    "commit from the pool": lambda: Commit(40, 0, 3),
    "commit from a full pool": lambda: Commit(40, 5, 9, retain=2),
    "decommit": lambda: Decommit(5, 40, 0),
    "decommit to the pool": lambda: Decommit(0, 40, 1, retain=3),
    "prefill": lambda: Prefill(4, 5, 1),
    "trim": lambda: Trim(0, 5, 4),
    "open": lambda: Open(0, 5, 1),
    "in place, seq-major": lambda: CacheScene(SEQ),
    "in place, head-major": lambda: CacheScene(HEAD),
    "in place, head-major, by less than double": lambda: CacheScene(HEAD, first=30, then=40, capacity=48),
    "reallocated, seq-major": lambda: CacheScene(SEQ, realloc=True),
    "reallocated, head-major": lambda: CacheScene(HEAD, realloc=True),
    "shrink": lambda: Shrink(SEQ, first=40, then=5),
    "grow over what was given up": lambda: Regrow(SEQ),
    "commit ahead": lambda: Ahead(SEQ),
    "pool grows": lambda: Pool(25),
    "pool grows into what was committed ahead": lambda: Pool(25, ahead=28),
    "pool shrinks": lambda: Pool(3),
}

# These do not fail as a whole: what could be done is done, and the outcome says what could not.
BEST_EFFORT = (Decommit, Trim, Shrink)


def count_calls(make: Callable[[], Scene]) -> int:
    scene = make()
    scene.stand.driver.arm(None)
    scene.run()
    return scene.stand.driver.num_calls


def patterns(calls: int) -> Iterator[frozenset[int]]:
    """The calls that fail: each one, each pair, and each one with all that follow."""
    for first in range(calls):
        yield frozenset({first})
        for second in range(first + 1, min(calls + 12, first + 14)):
            yield frozenset({first, second})
        yield frozenset(range(first, 1_000))


def judge(scene: Scene, failing: frozenset[int]) -> None:
    stand = scene.stand
    before = scene.state()
    stand.driver.arm(lambda number, name: number in failing)
    error: VmmError | None = None
    try:
        scene.run()
    except (DriverCallFailed, RangeQuarantined, ContentLost) as caught:
        error = caught
    stand.driver.arm(None)
    stand.assert_consistent()
    lost = bool(stand.pool.num_quarantined or any(arena.table.poisoned.any() for arena in stand.arenas))
    lost |= isinstance(error, ContentLost) or bool(getattr(getattr(scene, "held", None), "leaked_bytes", 0))
    lost |= isinstance(scene, Open) and stand.driver.num_events > 1  # taking it back failed too
    if error is not None and not lost:
        assert scene.state() == before, f"changed by {error}"
    if isinstance(error, RangeQuarantined):
        assert lost
    if error is not None and not isinstance(error, ContentLost) and isinstance(scene, (CacheScene, Pool)):
        assert scene.state() == before, "tokens, capacity and pages stay even when memory is lost"
    if error is None and not isinstance(scene, BEST_EFFORT) and len(failing) == 1:
        assert lost or not isinstance(scene, (Commit, Open, Prefill))
    if not lost:
        scene.run()
        stand.assert_consistent()
        scene.close()
        stand.assert_empty()


@pytest.mark.parametrize("name", SCENES)
def test_any_call_may_fail(name: str) -> None:
    make = SCENES[name]
    calls = count_calls(make)
    assert calls > 0
    for failing in patterns(calls):
        judge(make(), failing)


@pytest.mark.parametrize("failing", range(26))
def test_closing_gives_back_whatever_can_be(failing: int) -> None:
    scene = Commit(40, 40, 2)
    scene.arena.fence.record(1)
    scene.arena.fence.record(2)
    scene.stand.driver.arm(lambda number, name: number == failing)
    try:
        scene.close()
    except DriverCallFailed as error:
        closing = error.numbers["phase"] == "close"
        assert scene.arena.is_closed == closing
    scene.stand.driver.arm(None)
    scene.stand.assert_consistent()
    scene.close()
    scene.stand.assert_consistent()
    assert scene.stand.driver.num_handles <= 1
    account = scene.stand.governor.account(scene.stand.holder)
    assert account.owned == scene.stand.driver.num_handles * G


def test_a_cache_whose_tokens_were_lost_does_not_grow_before_it_was_released() -> None:
    scene = CacheScene(KvLayout.HEAD_MAJOR_BUCKET)
    copies = iter(range(100))
    scene.stand.driver.arm(lambda number, name: name == "copy_on_device" and next(copies) > 0)
    for _ in range(2):
        with pytest.raises(ContentLost):
            scene.run()
        scene.stand.driver.arm(None)
    assert scene.controller.capacity == 8
    scene.held.arena.wait_idle()
    scene.controller.shrink(0)
    assert scene.run().new == 16
    scene.close()
    scene.stand.assert_empty()


def assert_interrupted(scene, when) -> None:
    """Interrupt the run at the driver call for which `when(number, name)` holds; there must be one."""

    def interrupt(number: int, name: str) -> bool:
        if when(number, name):
            raise KeyboardInterrupt
        return False

    scene.stand.driver.arm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        scene.run()
    scene.stand.driver.arm(None)


def test_an_interrupt_in_the_middle_is_taken_back_too() -> None:
    scene = Commit(40, 0, 2)
    before = scene.state()
    assert_interrupted(scene, lambda number, name: name == "set_access")
    assert scene.state() == before
    scene.stand.assert_consistent()
    scene.run()
    scene.stand.assert_consistent()


def test_an_interrupt_while_giving_back_leaves_the_rest_committed() -> None:
    scene = Decommit(0, 40, 0)
    assert_interrupted(scene, lambda number, name: name == "unmap" and number == 2)
    scene.stand.assert_consistent()
    assert 0 < scene.arena.mapped_bytes < 6 * G
    scene.run()
    scene.stand.assert_consistent()
    assert scene.arena.mapped_bytes == 0


@pytest.mark.parametrize("last", [0, 2])
def test_an_interrupt_while_releasing_loses_no_handle(last: int) -> None:
    scene = Decommit(0, 40, 0) if last else Trim(0, 40, 0)
    scene.stand.pool.prefill(5)
    before = scene.stand.driver.num_handles
    releases = iter(range(100))
    assert_interrupted(scene, lambda number, name: name == "release_handle" and next(releases) == last)
    scene.stand.assert_consistent()
    assert scene.stand.driver.num_handles == before - last
    assert scene.stand.pool.num_quarantined == 1, "it may be gone"


def test_an_interrupted_reallocation_has_the_old_or_the_new_buffers() -> None:
    for stop in range(100):
        scene = CacheScene(KvLayout.HEAD_MAJOR_BUCKET, realloc=True)
        tokens = scene.tokens()

        def interrupt(number: int, name: str, stop: int = stop) -> bool:
            if number == stop:
                raise KeyboardInterrupt
            return False

        scene.stand.driver.arm(interrupt)
        try:
            scene.run()
        except KeyboardInterrupt:
            scene.stand.driver.arm(None)
            scene.stand.assert_consistent()
            assert scene.run().new == 16
            assert [kept[: len(was)] for kept, was in zip(scene.tokens(), tokens, strict=True)] == tokens
            scene.stand.assert_consistent()
        else:
            break
    assert stop > 10


def test_out_of_memory_of_the_device_is_a_failure_of_create() -> None:
    stand = VmmStand(G)
    stand.driver._total = 3 * G
    with pytest.raises(DriverCallFailed) as caught:
        stand.pool.prefill(4)
    assert caught.value.numbers == {"call": "create_handle", "phase": "create", "code": 2}
    stand.assert_consistent()
    assert stand.pool.prefill(3) == 3
