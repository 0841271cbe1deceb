"""Tokens survive every growth, and the graph survives when nothing that it has baked in changed."""

import random
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kv.errors import (
    ArenaClosed,
    CaptureInProgress,
    CommitOutOfRange,
    GrantOpen,
    GraphOutOfOrder,
    InvalidGeometry,
    LayoutRefused,
    RangeQuarantined,
    WorkInFlight,
)
from paged_kv.testing.vmm import VmmStand
from paged_kv.vmm import (
    AdmissionRefused,
    BasePlacement,
    BindingGeometry,
    CaptureGate,
    CommitAhead,
    FakeVmmDriver,
    GraphLifecycle,
    HandlePool,
    KvCacheGeometry,
    KvGrowthController,
    KvLayout,
    MappedStorage,
    MemoryGovernor,
    ReallocStorage,
    Tier,
)

G = 4096
HEAD, SEQ = KvLayout.HEAD_MAJOR_BUCKET, KvLayout.SEQ_MAJOR


def made(
    layout=SEQ, *, realloc=False, capacity=1_024, batch=1, heads=2, limit=1 << 30, placement=None, **options
):
    stand = VmmStand(G, backed=True, limit=limit)
    binding = BindingGeometry(layout, capacity, kv_heads=heads, head_dim=4, batch=batch)
    geometry = KvCacheGeometry((binding,) * 2)
    if realloc:
        held = ReallocStorage(geometry, stand.pool)
    else:
        held = MappedStorage(geometry, stand.pool, placement or BasePlacement.GRANULE_ALIGNED)
        stand.watch(held.arena)
    return stand, held, KvGrowthController(held, **{"min_bucket": 8, **options})


def element(controller, number: int, row: int, head: int, token: int) -> np.ndarray:
    """One head of one token, found by the layout's own strides."""
    held, binding = controller.storage, controller.storage.geometry.bindings[number]
    fixed = binding.layout in (KvLayout.SEQ_MAJOR, KvLayout.HEAD_MAJOR) and isinstance(held, MappedStorage)
    stride = binding.capacity if fixed else controller.capacity
    if binding.layout.is_head_major:
        place = (row * binding.kv_heads + head) * stride + token
    else:
        place = (row * stride + token) * binding.kv_heads + head
    driver = held.arena.pool.driver if isinstance(held, MappedStorage) else held._pool.driver
    size = binding.bytes_per_head
    return driver.view(held.address_of(number) + place * size, size)


def history(number: int, row: int, head: int, token: int) -> np.ndarray:
    mixed = np.random.default_rng((number, row, head, token)).integers(1, 255, 8)
    return mixed.astype(np.uint8)


def places(controller, tokens):
    binding = controller.storage.geometry.bindings[0]
    for token in tokens:
        for number in range(2):
            for row in range(binding.batch):
                for head in range(binding.kv_heads):
                    yield number, row, head, token


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        [
            (SEQ, False),
            (KvLayout.HEAD_MAJOR, False),
            (HEAD, False),
            (KvLayout.SEQ_MAJOR_BUCKET, False),
            (SEQ, True),
            (HEAD, True),
        ]
    ),
    st.integers(1, 3),
    st.sampled_from([48, 100, 128]),
    st.sampled_from(list(BasePlacement)),
    st.lists(st.integers(1, 25), min_size=2, max_size=6),
)
def test_every_token_stays_readable_and_new_memory_is_zero(kind, batch, capacity, placement, steps) -> None:
    layout, realloc = kind
    batch = 1 if layout is KvLayout.SEQ_MAJOR_BUCKET else batch
    stand, held, controller = made(
        layout, realloc=realloc, capacity=capacity, batch=batch, heads=3, placement=placement
    )
    length = 0
    for step in steps:
        old, length = length, min(length + step, capacity)
        controller.ensure(length)
        assert length <= controller.capacity <= capacity
        for place in places(controller, range(old, controller.capacity)):
            assert not element(controller, *place).any(), "nothing was written here yet"
        for place in places(controller, range(old, length)):
            element(controller, *place)[:] = history(*place)
        for place in places(controller, range(length)):
            assert (element(controller, *place) == history(*place)).all()
        if not realloc:
            stand.assert_consistent()
    held.close()
    stand.pool.close()
    stand.assert_empty()


def test_the_negative_oracle_a_graph_that_were_kept_over_head_major_would_read_other_tokens() -> None:
    """A captured step has the stride of its capacity: after the growth it finds head 1 elsewhere."""
    _, _, controller = made(HEAD)
    controller.ensure(8)
    for place in places(controller, range(8)):
        element(controller, *place)[:] = history(*place)
    binding = controller.storage.geometry.bindings[0]
    driver, base = controller.storage.arena.pool.driver, controller.storage.address_of(0)
    baked = base + (1 * 8 + 3) * binding.bytes_per_head
    assert (driver.view(baked, 8) == history(0, 0, 1, 3)).all()
    growth = controller.ensure(9)
    assert not growth.decision.keep
    assert "shape" in growth.decision.reason
    assert not (driver.view(baked, 8) == history(0, 0, 1, 3)).all()
    _, _, seq = made(SEQ)
    seq.ensure(8)
    element(seq, 0, 0, 1, 3)[:] = 77
    baked = seq.storage.address_of(0) + (3 * 2 + 1) * binding.bytes_per_head
    assert seq.ensure(9).decision.keep
    assert (seq.storage.arena.pool.driver.view(baked, 8) == 77).all()


def test_head_major_at_a_fixed_stride_moves_nothing_and_is_given_up_all_the_same() -> None:
    _, _, controller = made(KvLayout.HEAD_MAJOR)
    controller.ensure(8)
    growth = controller.ensure(9)
    assert (growth.decision.keep, growth.copied_bytes) == (False, 0)
    assert "row 0" in growth.decision.reason


def test_growth_is_in_the_order_that_loses_nothing() -> None:
    stand, held, controller = made(SEQ, stride=64)
    controller.ensure(1, stream=5)
    stand.driver.log.clear()
    order = []
    stand.driver.arm(lambda number, name: order.append((name, controller.capacity)) is not None)
    stand.driver.arm(None)

    def watch(number: int, name: str) -> bool:
        order.append((name, controller.capacity))
        return False

    stand.driver.arm(watch)
    growth = controller.ensure(300, stream=5)
    names = [name for name, _ in order]
    assert names == sorted(
        names, key=["create_handle", "map_handle", "set_access", "fill", "record_event"].index
    )
    assert {capacity for _, capacity in order} == {64}, "published last"
    assert (growth.old, growth.new, controller.capacity) == (64, 320, 320)
    assert all(arguments[-1] == 5 for name, arguments in stand.driver.log if name in ("fill", "record_event"))
    held.close()


def test_a_step_without_growth_does_nothing_at_all() -> None:
    stand, _, controller = made()
    assert controller.ensure(0) is None
    controller.ensure(8)
    stand.driver.log.clear()
    before = controller.counters
    for tokens in (0, 1, 8, np.int64(8)):
        assert controller.ensure(tokens) is None
    assert stand.driver.log == []
    assert controller.counters == before


def test_bad_lengths_are_typed_and_change_nothing() -> None:
    stand, _, controller = made(hard_max=100)
    controller.ensure(8)
    before = controller.counters, controller.capacity
    for tokens in (101, 1 << 60):
        for call in (controller.ensure, controller.commit_ahead):
            with pytest.raises(CommitOutOfRange) as caught:
                call(tokens)
            assert caught.value.numbers == {"needed": tokens, "maximum": 100}
    for tokens in (-1, 1.5, "8", True):
        with pytest.raises(InvalidGeometry):
            controller.ensure(tokens)
        with pytest.raises(InvalidGeometry):
            controller.shrink(tokens)
    with pytest.raises(CommitOutOfRange):
        controller.shrink(9)
    for options in ({"hard_max": 1_025}, {"hard_max": -1}, {"min_bucket": -1}, {"stride": 0}):
        with pytest.raises(InvalidGeometry):
            made(**options)
    assert (controller.counters, controller.capacity) == before
    stand.assert_consistent()


def test_growth_is_refused_to_a_capturing_thread_and_under_an_open_grant() -> None:
    stand, _, controller = made()
    controller.ensure(8)
    with stand.gate.capture():
        for call in (lambda: controller.ensure(600), controller.commit_ahead, lambda: controller.shrink(0)):
            with pytest.raises(CaptureInProgress):
                call()
        assert controller.ensure(8) is None, "a step that fits may be captured"
    with stand.governor.grant(stand.holder, 1), pytest.raises(GrantOpen):
        controller.ensure(600)
    assert controller.capacity == 8
    stand.assert_consistent()


@pytest.mark.parametrize("layout", [SEQ, HEAD])
def test_nothing_grows_inside_a_step(layout) -> None:
    _, _, controller = made(layout, graph=GraphLifecycle())
    controller.ensure(8)
    element(controller, 0, 0, 1, 3)[:] = 5
    with controller.graph.step():
        for call in (lambda: controller.ensure(9), lambda: controller.shrink(0)):
            with pytest.raises(GraphOutOfOrder):
                call()
        assert controller.ensure(8) is None
    assert controller.capacity == 8
    assert (element(controller, 0, 0, 1, 3) == 5).all()
    assert controller.ensure(9).new == 16


def test_a_refusal_is_a_value_and_is_counted() -> None:
    stand, _, controller = made(limit=2 * G)
    controller.ensure(256)
    refused = controller.ensure(257)
    assert isinstance(refused, AdmissionRefused)
    assert refused.http_status == 429
    assert (controller.capacity, controller.counters.refusals) == (256, 1)
    assert controller.commit_ahead() == refused
    stand.assert_consistent()


def test_growth_over_a_quarantined_range() -> None:
    stand, _, controller = made()
    controller.ensure(1_024)
    stand.driver.arm(lambda number, name: name == "unmap" and number == 1)
    assert controller.shrink(8).quarantined_granules == (1,)
    stand.driver.arm(None)
    before = controller.counters
    with pytest.raises(RangeQuarantined) as caught:
        controller.ensure(1_000)
    assert caught.value.numbers["granules"] == (1,)
    assert (controller.capacity, controller.counters) == (8, before)
    assert controller.ensure(200).new == 256
    stand.assert_consistent()


def test_shrinking_keeps_the_graph_and_comes_back_zero() -> None:
    stand, _, controller = made(graph=GraphLifecycle())
    controller.ensure(1_000)
    for place in places(controller, range(1_000)):
        element(controller, *place)[:] = 9
    controller.storage.arena.fence.record(1)
    outcome = controller.shrink(100)
    assert outcome.refunded_bytes == 2 * 3 * G
    assert (controller.capacity, controller.counters.invalidations) == (100, 1)
    stand.assert_consistent()
    growth = controller.ensure(150)
    assert growth.decision.keep
    assert growth.billed_bytes == 0
    for place in places(controller, range(100, controller.capacity)):
        assert not element(controller, *place).any()
    for place in places(controller, range(100)):
        assert (element(controller, *place) == 9).all()
    assert controller.shrink(0).refunded_bytes == 2 * G
    assert controller.ensure(1).decision.keep


def test_what_cannot_shrink_says_so() -> None:
    _, _, head = made(HEAD)
    head.ensure(100)
    with pytest.raises(LayoutRefused):
        head.shrink(50)
    assert head.shrink(0).complete
    assert head.counters.invalidations == 2, "its shape changed"
    _, held, realloc = made(realloc=True)
    realloc.ensure(8)
    for call in (lambda: realloc.shrink(0), realloc.commit_ahead):
        with pytest.raises(LayoutRefused):
            call()
    held.close()
    held.close()
    for number in (0, -1):
        with pytest.raises(ArenaClosed):
            held.address_of(number)
    other = BindingGeometry(HEAD, 8, 1, 1)
    with pytest.raises(InvalidGeometry):
        MappedStorage(KvCacheGeometry((other, BindingGeometry(SEQ, 8, 1, 1))), VmmStand(G).pool)


def test_shrinking_waits_for_nobody() -> None:
    stand, held, controller = made()
    controller.ensure(1_000)
    stand.driver.hold(2)
    stand.driver.launch(2)
    held.arena.fence.record(2)
    with pytest.raises(WorkInFlight):
        controller.shrink(1)
    assert controller.capacity == 1_024
    held.close()
    stand.assert_empty()


def test_memory_committed_ahead_makes_the_growth_free() -> None:
    stand, held, controller = made(stride=256)
    controller.ensure(200, stream=1)
    done = controller.commit_ahead(stream=2)
    assert (done.billed_bytes, controller.capacity, controller.committed) == (2 * G, 256, 512)
    assert controller.commit_ahead(400, stream=2) is None
    assert controller.commit_ahead(600, stream=2).billed_bytes == 2 * G
    stand.driver.log.clear()
    growth = controller.ensure(600, stream=1)
    assert (growth.billed_bytes, growth.new) == (0, 768)
    assert [name for name, _ in stand.driver.log] == ["stream_wait_event"]
    assert stand.driver.log[0][1][0] == 1, "the writer waits for the zeroing"
    assert controller.counters.grants == 1
    controller.shrink(100)
    assert controller.committed == 100
    held.close()
    stand.assert_empty()


def test_the_worker_keeps_ahead_of_the_steps() -> None:
    stand, held, controller = made(stride=256)
    controller.ensure(1)
    with CommitAhead(controller, margin=256, stream=2) as ahead:
        for length in range(1, 1_025):
            ahead.poke(length)
            while controller.committed < min(length + 256, 1_024):
                threading.Event().wait(0.001)
            growth = controller.ensure(length)
            assert growth is None or growth.billed_bytes == 0
    assert ahead.commits == 3
    assert ahead.problems == []
    assert controller.capacity == 1_024
    stand.assert_consistent()
    held.close()
    stand.assert_empty()


def test_the_worker_goes_on_after_the_cache_has_shrunk() -> None:
    stand, held, controller = made(stride=256)
    controller.ensure(1)
    with CommitAhead(controller, margin=512, stream=2) as ahead:
        for kept in (0, 256):
            ahead.poke(256)
            while controller.committed < 768:
                threading.Event().wait(0.001)
            held.arena.wait_idle()
            controller.shrink(min(kept, controller.capacity))
            assert controller.committed <= 256
            controller.ensure(256)
        ahead.poke(256)
        while controller.committed < 768:
            threading.Event().wait(0.001)
    assert (ahead.commits, ahead.problems) == (3, [])
    stand.assert_consistent()


def test_a_holder_that_fails_to_give_way_does_not_end_the_worker() -> None:
    stand, _, controller = made(limit=4 * G, stride=256)
    controller.ensure(1)

    def broken(nbytes: int) -> int:
        raise RuntimeError("cannot")

    other = stand.governor.register("other", reclaim=broken)
    with CommitAhead(controller, margin=512, stream=2) as ahead:
        ahead.poke(256)
        while not ahead.problems:
            threading.Event().wait(0.001)
        stand.governor.set_reclaim(other, None)
        ahead.poke(512)
        while len(ahead.problems) < 2:
            threading.Event().wait(0.001)
    assert str(ahead.problems[0]) == "cannot"
    assert isinstance(ahead.problems[1], AdmissionRefused)


def test_an_interrupted_shrink_leaves_no_capacity_without_memory() -> None:
    stand, held, controller = made()
    controller.ensure(1_024)

    def interrupt(number: int, name: str) -> bool:
        if name == "unmap" and held.arena.mapped_bytes < 7 * G:
            raise KeyboardInterrupt
        return False

    stand.driver.arm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        controller.shrink(100)
    stand.driver.arm(None)
    stand.assert_consistent()
    assert (controller.capacity, controller.committed) == (100, 100)
    assert controller.ensure(1_024).billed_bytes == 2 * G
    element(controller, 1, 0, 1, 1_023)
    stand.assert_consistent()


def test_a_capturing_thread_does_not_wait_for_a_worker_that_waits_for_it() -> None:
    stand, _, controller = made(stride=256)
    controller.ensure(1)
    ahead = CommitAhead(controller, margin=512, stream=2)
    with ahead:
        with stand.gate.capture():
            ahead.poke(256)
            with pytest.raises(CaptureInProgress):
                ahead.stop()
        ahead.stop()
    assert not ahead._thread.is_alive()
    assert controller.committed in (256, 768)
    stand.assert_consistent()


def test_what_goes_wrong_ahead_is_kept_and_the_step_finds_out() -> None:
    stand, _, controller = made(limit=2 * G)
    controller.ensure(1)
    ahead = CommitAhead(controller, margin=1_024)
    ahead.stop()
    ahead._commit(1_024)
    assert [problem.reason for problem in ahead.problems] == ["capacity"]
    stand.driver.arm(lambda number, name: name == "create_handle")
    stand2, _, other = made()
    other.ensure(1)
    stand2.driver.arm(lambda number, name: name == "create_handle")
    failing = CommitAhead(other, margin=1_024)
    failing._commit(1_024)
    failing._commit(8)
    assert [problem.rule for problem in failing.problems] == ["DriverCallFailed"]
    assert failing.commits == 0
    stand2.assert_consistent()


def test_a_step_is_never_held_up_by_a_commit_ahead() -> None:
    """While the worker sits in a driver call, a step that fits goes through."""
    stand, _, controller = made(stride=256)
    controller.ensure(200)
    inside, leave = threading.Event(), threading.Event()

    def slow(number: int, name: str) -> bool:
        if name == "create_handle":
            inside.set()
            leave.wait(5)
        return False

    stand.driver.arm(slow)
    with CommitAhead(controller, margin=256) as ahead:
        ahead.poke(200)
        assert inside.wait(2)
        for length in range(200, 257):
            assert controller.ensure(length) is None
        leave.set()
    stand.driver.arm(None)
    assert controller.ensure(257).billed_bytes == 0
    stand.assert_consistent()


def test_growth_and_commit_ahead_from_two_threads_agree() -> None:
    stand, held, controller = made(stride=8, placement=BasePlacement.PACKED)
    problems = []

    def ahead() -> None:
        try:
            for tokens in range(8, 1_025, 8):
                controller.commit_ahead(tokens, stream=2)
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=ahead)
    thread.start()
    for tokens in range(1, 1_025, 3):
        controller.ensure(tokens, stream=1)
    thread.join()
    assert problems == []
    assert held.arena.mapped_bytes == 8 * G
    stand.assert_consistent()


def test_a_reallocation_needs_room_for_old_and_new() -> None:
    stand, held, controller = made(realloc=True, limit=3 * 2 * 16 * 16)
    controller.ensure(16)
    before = [held.address_of(number) for number in range(2)]
    refused = controller.ensure(33)
    assert refused == AdmissionRefused(
        2 * 64 * 16, 2 * 32 * 16, 3 * 2 * 16 * 16, stand.holder.tier, "reallocated cache"
    )
    assert [held.address_of(number) for number in range(2)] == before
    assert controller.ensure(17).new == 32
    assert held.leased_bytes == held.physical_bytes == 2 * 32 * 16
    held.close()
    assert held.leased_bytes == 0


def test_a_reallocation_waits_for_its_copies_before_it_frees_what_they_read() -> None:
    stand, held, controller = made(realloc=True)
    controller.ensure(16, stream=1)
    stand.driver.log.clear()
    controller.ensure(17, stream=1)
    names = [name for name, _ in stand.driver.log]
    last_copy = max(number for number, name in enumerate(names) if name == "copy_on_device")
    assert last_copy < names.index("synchronize") < names.index("free")
    held.close()


def test_a_reallocation_in_a_capture_leases_nothing() -> None:
    stand, held, _ = made(realloc=True)
    with stand.gate.capture(), pytest.raises(CaptureInProgress):
        held.grow(0, 16, 1)
    assert held.leased_bytes == stand.governor.tier(Tier.DEVICE).used == 0
    for bad in ("0", True, 2):
        with pytest.raises(ArenaClosed):
            held.address_of(bad)


def test_a_buffer_that_cannot_be_freed_leaks_its_own_bytes() -> None:
    stand = VmmStand(G)
    bindings = tuple(BindingGeometry(SEQ, 64, kv_heads=heads, head_dim=4) for heads in (1, 7))
    held = ReallocStorage(KvCacheGeometry(bindings), stand.pool)
    held.grow(0, 8, 1)
    first = iter((True,))
    stand.driver.arm(lambda number, name: name == "free" and next(first, False))
    held.grow(8, 16, 1)
    assert held.leaked_bytes == 8 * bindings[0].bytes_per_token


def test_closing_twice() -> None:
    stand, held, controller = made()
    controller.ensure(100)
    held.close()
    held.close()
    with pytest.raises(ArenaClosed):
        controller.ensure(1_000)
    stand.assert_empty()


def test_engines_workers_and_captures_on_many_threads() -> None:
    """Two caches that compete for memory, each with an engine, a worker ahead and a pool filler."""
    gate, driver, governor = CaptureGate(), FakeVmmDriver(G), MemoryGovernor(device=40 * G)
    pools, controllers, problems = [], [], []
    for number in range(2):
        holder = governor.register(f"cache {number}", priority=number)
        pools.append(HandlePool(driver, governor, holder, retain=3, gate=gate))
        geometry = KvCacheGeometry((BindingGeometry(SEQ, 256, 4, 16),) * 4)
        controllers.append(KvGrowthController(MappedStorage(geometry, pools[-1]), stride=16))

    def engine(number: int, choose: random.Random) -> None:
        controller = controllers[number]
        for _ in range(150):
            kind = choose.random()
            if kind < 0.5:
                controller.ensure(choose.randint(0, 256), stream=1 + number)
                controller.storage.arena.fence.record(1 + number)
            elif kind < 0.8:
                controller.shrink(choose.randint(0, controller.capacity))
            elif kind < 0.9:
                with gate.capture():
                    driver.begin_capture(5)
                    controller.ensure(controller.capacity)
                    driver.end_capture(5)
            else:
                lease = governor.reserve("other", choose.randint(0, 10 * G))
                if not isinstance(lease, AdmissionRefused):
                    lease.release()

    def ahead(number: int, choose: random.Random) -> None:
        for _ in range(150):
            controllers[number].commit_ahead(choose.randint(0, 256), stream=9)

    def filler(number: int, choose: random.Random) -> None:
        for _ in range(300):
            pools[number].prefill(choose.randint(0, 6))
            pools[number].trim(choose.randint(0, 6))

    def guarded(work, number: int) -> None:
        try:
            work(number, random.Random(number))
        except Exception as error:
            problems.append(error)

    threads = [
        threading.Thread(target=guarded, args=(work, number))
        for number in range(2)
        for work in (engine, ahead, filler)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert problems == []
    assert driver.impossible == []
    for controller in controllers:
        controller.storage.arena.check()
    accounts = [governor.account(pool.holder) for pool in pools]
    assert sum(account.owned for account in accounts) == driver.num_handles * G
    assert sum(account.mapped for account in accounts) == len(driver.mapped) * G
    for controller, pool in zip(controllers, pools, strict=True):
        controller.storage.close()
        pool.close()
    assert (driver.num_handles, governor.tier(Tier.DEVICE).used) == (0, 0)
