"""Whatever is wrong is a typed error with numbers, survives pickling, and changes nothing."""

import inspect
import pickle
import threading

import numpy as np
import pytest
from paged_kv import (
    CacheKey,
    CapacityDeferred,
    IndexPlanBuffers,
    KVCacheManager,
    LatentCacheGeometry,
    PagedIndexPlan,
    PagedRequest,
    PageGeometry,
    PrefixChain,
    UnserviceableRequest,
    errors,
)
from paged_kv.errors import (
    EpochOutOfOrder,
    HitClosed,
    InvalidGeometry,
    InvalidLength,
    InvalidWindow,
    KvError,
    NoFreeRow,
    PagedBlockIdOverflow,
    PagedBufferTooSmall,
    PagedDuplicateRequest,
    PagedInvalidBlockSize,
    PagedMissingPages,
    PagedNonContiguousSequence,
    PageDoubleFree,
    PagedQueryExceedsContext,
    PagedSharedWrite,
    PagedSlotOverflow,
    PagedTableTooNarrow,
    PageNotResident,
    PinUnderflow,
    PositionEvicted,
    PrefixMismatch,
    RowBusy,
    RowNotEmpty,
    StalePlan,
    StaleSequenceHandle,
    SwapClosed,
    UnknownSequence,
    UnsupportedSink,
    WrongThread,
)

KEY = CacheKey(model="m", dtype="float16", layout="LATENT")
LEAVES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, KvError) and not kind.__subclasses__()
]


def manager(usable: int = 8, **options) -> KVCacheManager:
    options = {"max_sequences": 6, "max_blocks_per_sequence": 8, **options}
    return KVCacheManager(PageGeometry(usable + 1, 16), **options)


def chain_of(tokens) -> PrefixChain:
    chain = PrefixChain(KEY, 16)
    chain.extend(tokens)
    return chain


def run(kv: KVCacheManager, rows, lengths) -> None:
    with kv.begin_step(rows, lengths) as step:
        step.commit()
    kv.complete(step.epoch)


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_is_a_built_in_and_survives_pickling(kind: type[KvError]) -> None:
    error = kind("3 given, 2 allowed", given=3, maximum=2, rows=(1, 2))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "3 given, 2 allowed"
    assert again.numbers == {"given": 3, "maximum": 2, "rows": (1, 2)}
    assert again.rule == kind.__name__
    assert isinstance(error, (ValueError, RuntimeError))


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((8, 8), PagedInvalidBlockSize),
        ((8, 24), PagedInvalidBlockSize),
        ((8, 0), PagedInvalidBlockSize),
        ((8, -16), PagedInvalidBlockSize),
        ((8, 16.0), InvalidGeometry),
        ((True, 16), InvalidGeometry),
        ((1, 16), InvalidGeometry),
        ((0, 16), InvalidGeometry),
        ((2**27, 16), PagedSlotOverflow),
        ((2**31, 16), PagedBlockIdOverflow),
    ],
)
def test_geometries_that_cannot_work_are_refused(arguments: tuple, kind: type[KvError]) -> None:
    with pytest.raises(kind) as refusal:
        PageGeometry(*arguments)
    assert refusal.value.numbers


def test_a_pool_of_one_page_works_without_a_null_page_only() -> None:
    with pytest.raises(InvalidGeometry):
        PageGeometry(1, 16)
    kv = KVCacheManager(PageGeometry(1, 16, null_page=False), max_sequences=2)
    with kv.begin_step(kv.create(1), 16) as step:
        assert step.plan().block_table.tolist() == [[0]]
        step.commit()
    assert kv.begin_step(kv.create(1), 1) == CapacityDeferred(1, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"latent_dim": 580},
        {"latent_dim": 0},
        {"rotary_offset": 4},
        {"rotary_dim": 8},
        {"rotary_dim": 63},
        {"rotary_dim": -16},
        {"rotary_dim": 80},
        {"v_head_size": 600},
        {"v_head_size": -1},
        {"num_blocks": 0},
        {"num_blocks": 2**62},
        {"num_blocks": 1.5},
    ],
)
def test_latent_geometries_that_the_operator_refuses_are_refused(change: dict) -> None:
    good = {
        "num_blocks": 64,
        "block_size": 16,
        "latent_dim": 576,
        "v_head_size": 512,
        "rotary_dim": 64,
        "rotary_offset": 512,
    }
    LatentCacheGeometry(**good)
    with pytest.raises(InvalidGeometry):
        LatentCacheGeometry(**{**good, **change})
    with pytest.raises(PagedInvalidBlockSize):
        LatentCacheGeometry(**{**good, "block_size": 8})


def test_latent_offsets_are_checked() -> None:
    geometry = LatentCacheGeometry(4, 16, 192, v_head_size=128, rotary_dim=64, rotary_offset=128)
    assert not geometry.needs_64_bit_offsets
    for index in ((4, 0, 0), (0, 16, 0), (0, 0, 192), (-1, 0, 0)):
        with pytest.raises(InvalidGeometry):
            geometry.latent_element_offset(*index)


@pytest.mark.parametrize(
    "options",
    [
        {"max_sequences": 0},
        {"max_sequences": 2**24 + 1},
        {"max_blocks_per_sequence": 0},
        {"max_blocks_per_sequence": 2**31},
        {"watermark": 8},
        {"watermark": -1},
        {"host_blocks": -1},
        {"max_preemptions": "three"},
    ],
)
def test_managers_that_cannot_work_are_refused(options: dict) -> None:
    with pytest.raises(InvalidGeometry):
        manager(**options)


@pytest.fixture
def kv() -> KVCacheManager:
    return manager(host_blocks=4)


def assert_refused(kv: KVCacheManager, kind: type[KvError], call) -> KvError:
    """Assert that `call` raises `kind`, which survives pickling, and that nothing has changed."""
    before = kv.digest()
    with pytest.raises(kind) as refusal:
        call()
    assert kv.digest() == before
    pickle.loads(pickle.dumps(refusal.value))
    return refusal.value


@pytest.mark.parametrize("bad", [[-1], [0], [2**62], [2**40 + 5], [1.5], [[1]], ["x"]])
def test_foreign_handles(kv: KVCacheManager, bad: list) -> None:
    kv.create(1)
    for call in (kv.release, kv.preempt, kv.swap_out, lambda rows: kv.begin_step(rows, 1)):
        assert_refused(kv, UnknownSequence, lambda call=call: call(bad))


def test_handles_of_another_manager(kv: KVCacheManager) -> None:
    kv.create(3)
    assert_refused(kv, UnknownSequence, lambda: kv.release(manager().create(2)))


def test_stale_handles_and_double_release(kv: KVCacheManager) -> None:
    rows = kv.create(2)
    kv.release(rows)
    kv.create(6)
    error = assert_refused(kv, StaleSequenceHandle, lambda: kv.release(rows))
    assert error.numbers["generation"] == 1
    assert_refused(kv, StaleSequenceHandle, lambda: kv.begin_step(rows, 1))


def test_a_row_twice(kv: KVCacheManager) -> None:
    row = kv.create(1)[0]
    for call in (kv.release, kv.preempt, lambda rows: kv.begin_step(rows, 1)):
        assert_refused(kv, PagedDuplicateRequest, lambda call=call: call([row, row]))
    assert_refused(
        kv,
        PagedDuplicateRequest,
        lambda: PagedIndexPlan.build(kv.view(), [PagedRequest(int(row), 0, 0)] * 2),
    )


@pytest.mark.parametrize("bad", [-1, 2**31, [1, 2], [1.0], [[1]], "x", np.array([2**63], dtype=np.uint64)])
def test_lengths_that_are_none(kv: KVCacheManager, bad) -> None:
    row = kv.create(1)
    assert_refused(kv, InvalidLength, lambda: kv.begin_step(row, bad))
    assert_refused(kv, InvalidLength, lambda: kv.truncate(row, bad))
    if not isinstance(bad, list) or len(bad) < 2:
        assert_refused(kv, InvalidLength, lambda: kv.admit(bad))


def test_outcomes_are_values_and_change_nothing(kv: KVCacheManager) -> None:
    rows = kv.create(2)
    run(kv, rows[:1], 100)
    before = kv.digest()
    assert kv.begin_step(rows[1:], 100) == CapacityDeferred(7, 1, 1)
    assert kv.begin_step(rows[1:], 8 * 16 + 1) == UnserviceableRequest(9, 8)
    assert kv.admit(100) == CapacityDeferred(7, 1, 1)
    assert kv.admit([1] * 7) == UnserviceableRequest(7, 6, "rows")
    assert kv.admit([1] * 5).reason == "rows"
    assert kv.digest() == before


def test_a_large_pool_has_rows_of_a_sensible_width() -> None:
    kv = KVCacheManager(PageGeometry(100_000, 16), max_sequences=2)
    assert kv.view().cells.shape == (2, 16_384)
    assert kv.admit(16_384 * 16 + 1) == UnserviceableRequest(16_385, 16_384, "columns")


def test_a_row_too_wide_for_its_table() -> None:
    kv = manager(usable=20, max_blocks_per_sequence=2)
    assert kv.begin_step(kv.create(1), 33) == UnserviceableRequest(3, 2, "columns")
    assert kv.admit(33) == UnserviceableRequest(3, 2, "columns")


def test_rows_that_a_step_or_swap_holds(kv: KVCacheManager) -> None:
    rows = kv.create(3)
    run(kv, rows, [20, 20, 5])
    out = kv.swap_out(rows[1])
    step = kv.begin_step(rows[:1], 1)
    for name in rows[:2]:
        for call in (kv.release, kv.preempt, kv.fork, kv.pin, kv.swap_out, lambda row: kv.truncate(row, 1)):
            assert_refused(kv, RowBusy, lambda call=call, name=name: call(name))
    step.rollback()
    assert_refused(kv, PageNotResident, lambda: kv.begin_step(rows, 1))
    kv.confirm_swap(out)
    for call in (kv.fork, kv.pin, kv.swap_out, lambda row: kv.truncate(row, 1)):
        assert_refused(kv, PageNotResident, lambda call=call: call(rows[1]))
    error = assert_refused(kv, PageNotResident, lambda: kv.begin_step(rows[1:2], 1))
    assert error.numbers["state"] == "swapped"
    assert_refused(
        kv,
        PageNotResident,
        lambda: PagedIndexPlan.build(kv.view(), [PagedRequest(int(rows[1]), 1, 5)]),
    )
    assert_refused(kv, SwapClosed, lambda: kv.confirm_swap(out))
    assert_refused(kv, SwapClosed, lambda: kv.cancel_swap(out))
    assert_refused(kv, InvalidLength, lambda: kv.swap_in(rows[2]))


def test_host_room_is_an_outcome(kv: KVCacheManager) -> None:
    rows = kv.create(2)
    run(kv, rows, [48, 33])
    assert kv.swap_out(rows) == UnserviceableRequest(6, 4, "host_pages")
    kv.swap_out(rows[0])
    assert kv.swap_out(rows[1]) == CapacityDeferred(3, 1, 1, "host_pages")


def test_epochs_complete_in_order(kv: KVCacheManager) -> None:
    row = kv.create(1)
    assert_refused(kv, EpochOutOfOrder, lambda: kv.complete(1))
    run(kv, row, 1)
    assert_refused(kv, EpochOutOfOrder, lambda: kv.complete(1))
    step = kv.begin_step(row, 1)
    assert_refused(kv, EpochOutOfOrder, lambda: kv.complete(step.epoch))


def test_rows_run_out(kv: KVCacheManager) -> None:
    row = kv.create(5)[0]
    assert_refused(kv, NoFreeRow, lambda: kv.create(2))
    assert_refused(kv, NoFreeRow, lambda: kv.fork(row, 2))


def test_windows_and_sinks(kv: KVCacheManager) -> None:
    assert_refused(kv, InvalidWindow, lambda: kv.create(1, window=-1))
    assert_refused(kv, InvalidWindow, lambda: kv.admit(5, window=-1))
    assert_refused(kv, UnsupportedSink, lambda: kv.create(1, sink=4))
    plain, windowed = kv.create(1), kv.create(1, window=16)
    run(kv, windowed, 70)
    assert_refused(kv, InvalidWindow, lambda: kv.advance_window(plain))
    assert_refused(kv, InvalidWindow, lambda: kv.register(windowed[0], chain_of(range(70))))
    assert kv.advance_window(windowed) == 3
    assert assert_refused(kv, PositionEvicted, lambda: kv.truncate(windowed, 50)).numbers["first"] == 48
    assert_refused(kv, PositionEvicted, lambda: kv.fork(windowed[0], at=50))
    kv.truncate(windowed, 64)
    step = kv.begin_step(windowed, 1)
    assert_refused(kv, PagedNonContiguousSequence, step.plan)
    assert step.plan(allow_window_holes=True).block_table[0].tolist() == [-1, -1, -1, 4, 6]
    step.commit()
    request = [PagedRequest(int(windowed[0]), 1, 65)]
    assert_refused(kv, PagedNonContiguousSequence, lambda: PagedIndexPlan.build(kv.view(), request))
    plan = PagedIndexPlan.build(kv.view(), request, allow_window_holes=True, pad=7)
    assert plan.block_table[0].tolist() == [7, 7, 7, 4, 6]


def test_truncating_and_forking_beyond_the_row(kv: KVCacheManager) -> None:
    row = kv.create(1)
    run(kv, row, 20)
    assert_refused(kv, InvalidLength, lambda: kv.truncate(row, 21))
    assert_refused(kv, InvalidLength, lambda: kv.fork(row[0], at=21))


def test_plans_outside_a_step(kv: KVCacheManager) -> None:
    row, other = kv.create(2)
    run(kv, [row, other], [40, 16])
    view = kv.view()
    build = PagedIndexPlan.build
    assert_refused(kv, PagedQueryExceedsContext, lambda: build(view, [PagedRequest(int(row), 5, 4)]))
    assert_refused(kv, PagedMissingPages, lambda: build(view, [PagedRequest(int(row), 1, 49)]))
    assert_refused(
        kv, PagedTableTooNarrow, lambda: build(view, [PagedRequest(int(row), 1, 40)], max_blocks=2)
    )
    assert_refused(kv, InvalidLength, lambda: build(view, [PagedRequest(int(row), -1, 4)]))
    kv.register(other, chain_of(range(16)))
    error = assert_refused(kv, PagedSharedWrite, lambda: build(view, [PagedRequest(int(other), 1, 16)]))
    assert error.numbers["page"] == 4
    plan = build(view, [PagedRequest(int(other), 1, 16)], allow_shared_writes=True)
    assert plan.slot_mapping.tolist() == [4 * 16 + 15]
    plan = build(view, [PagedRequest(int(row), 30, 40), PagedRequest(int(other), 0, 16)], max_blocks=5)
    assert plan.block_table.tolist() == [[1, 2, 3, -1, -1], [4, -1, -1, -1, -1]]
    assert plan.past_seqlens.tolist() == [10, 16]
    assert plan.slot_mapping[:7].tolist() == [26, 27, 28, 29, 30, 31, 32]
    assert plan.epoch == 0
    assert plan.graph_key == (2, 30, 8)
    empty = build(view, [])
    assert empty.graph_key == (1, 0, 8)
    assert empty.attention_metadata.tolist() == [0, 0, 0]


def test_stale_plans(kv: KVCacheManager) -> None:
    rows = kv.create(2)
    with kv.begin_step(rows, [20, 5]) as step:
        plan = step.plan()
        step.commit()
    kv.require_current(plan)
    kv.truncate(rows[0], 3)
    assert assert_refused(kv, StalePlan, lambda: kv.require_current(plan)).numbers["row"] == 0
    with kv.begin_step(rows, 1) as step:
        late = step.plan()
        step.commit()
    run(kv, rows, 1)
    assert_refused(kv, StalePlan, lambda: kv.require_current(late))


def test_buffers_that_do_not_hold_the_batch(kv: KVCacheManager) -> None:
    rows = kv.create(3)
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(InvalidGeometry):
            IndexPlanBuffers(*sizes)
    with pytest.raises(InvalidGeometry):
        IndexPlanBuffers(2, 2, 2, memory=bytes(4096))
    with pytest.raises(InvalidGeometry):
        IndexPlanBuffers(2, 2, 2, memory=bytearray(16))
    with pytest.raises(InvalidGeometry):
        IndexPlanBuffers(2, 2, 2, memory=object())
    step = kv.begin_step(rows, [20, 1, 1])
    assert_refused(kv, PagedBufferTooSmall, lambda: step.plan(IndexPlanBuffers(2, 64, 8)))
    assert_refused(kv, PagedBufferTooSmall, lambda: step.plan(IndexPlanBuffers(4, 21, 8)))
    assert_refused(kv, PagedTableTooNarrow, lambda: step.plan(IndexPlanBuffers(4, 64, 1)))


def test_hits_are_used_once(kv: KVCacheManager) -> None:
    row, other = kv.create(2)
    run(kv, [row], 33)
    kv.register(row, chain_of(range(33)))
    assert_refused(kv, PrefixMismatch, lambda: kv.register(row, chain_of(range(1, 34))))
    chain = chain_of(range(40))
    hit = kv.lookup_and_pin(chain)
    assert_refused(kv, RowNotEmpty, lambda: kv.attach(row, hit))
    assert kv.attach(other, hit) is None
    assert_refused(kv, HitClosed, lambda: kv.attach(other, hit))
    assert_refused(kv, HitClosed, hit.drop)
    assert_refused(kv, HitClosed, lambda: kv.admit(50, hits=[hit]))
    second = kv.lookup_and_pin(chain)
    assert_refused(kv, HitClosed, lambda: kv.admit([50, 50], hits=[second, second]))
    assert_refused(kv, InvalidLength, lambda: kv.admit([50, 50], hits=[second]))
    assert_refused(kv, InvalidLength, lambda: kv.admit([20], hits=[second]))


def test_a_hit_wider_than_a_row() -> None:
    kv = KVCacheManager(PageGeometry(9, 16), max_sequences=4, max_blocks_per_sequence=2)
    rows = kv.create(2)
    run(kv, rows[:1], 32)
    kv.register(rows[0], chain_of(range(32)))
    hit = kv.lookup_and_pin(chain_of(range(64)))
    kv._state.table.num_columns = 1
    with pytest.raises(InvalidLength):
        kv.attach(rows[1], hit)


def test_a_resumed_sequence_keeps_its_tokens(kv: KVCacheManager) -> None:
    row = kv.create(1)
    run(kv, row, 20)
    [left] = kv.preempt(row)
    assert_refused(kv, InvalidLength, lambda: kv.resume(left, 19))


def test_tokens_that_are_no_ids() -> None:
    chain = PrefixChain(KEY, 16)
    for bad in ([2**31], [-(2**31) - 1], [0.5], [[1, 2]]):
        with pytest.raises(InvalidLength):
            chain.extend(bad)
    assert chain.num_tokens == 0
    chain.extend([])
    chain.extend(range(40))
    with pytest.raises(InvalidLength):
        chain.truncate(41)
    chain.truncate(20)
    assert (chain.num_tokens, len(chain.digests)) == (20, 1)
    again = PrefixChain(KEY, 16)
    again.extend(np.arange(10))
    again.extend(np.arange(10, 20))
    assert again.digests == chain.digests
    with pytest.raises(PagedInvalidBlockSize):
        PrefixChain(KEY, 10)


def test_the_pool_refuses_pages_that_nobody_holds(kv: KVCacheManager) -> None:
    pool = kv._state.pool
    with pytest.raises(PageDoubleFree):
        pool.require_refs(np.array([1, 2]))
    with pytest.raises(PinUnderflow):
        pool.require_pins(np.array([1]))


def test_one_thread_owns_the_manager(kv: KVCacheManager) -> None:
    caught: list[Exception] = []

    def use() -> None:
        try:
            kv.create(1)
        except WrongThread as error:
            caught.append(error)

    def adopt() -> None:
        kv.adopt()
        kv.create(1)

    for target in (use, adopt):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert len(caught) == 1
    with pytest.raises(WrongThread):
        kv.create(1)
    kv.adopt()
    assert kv.stats().num_sequences == 1
