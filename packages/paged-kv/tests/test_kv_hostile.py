"""Arguments of the wrong kind and claims of the wrong owner: a typed error, and nothing changed."""

import copy

import numpy as np
import pytest
from paged_kv import (
    CacheKey,
    CapacityDeferred,
    IndexPlanBuffers,
    KVCacheManager,
    LatentCacheGeometry,
    PagedIndexPlan,
    PageGeometry,
    PreemptedSequence,
    PrefixChain,
    token_major_element_offset,
)
from paged_kv.errors import (
    EpochOutOfOrder,
    ForeignClaim,
    InvalidGeometry,
    InvalidLength,
    InvalidTenant,
    InvalidWindow,
    InvariantViolation,
    KvConfigError,
    KvError,
    PagedSlotOverflow,
    PageNotOwned,
    UnknownSequence,
)

KEY = CacheKey(model="m", dtype="float16", layout="LATENT")


def chain_of(tokens) -> PrefixChain:
    chain = PrefixChain(KEY, 16)
    chain.extend(tokens)
    return chain


def run(kv: KVCacheManager, rows, lengths) -> None:
    with kv.begin_step(rows, lengths) as step:
        step.commit()
    kv.complete(step.epoch)


def manager() -> KVCacheManager:
    """Row 0 has 40 tokens, two pages of them registered; row 1 is on its way to the host."""
    kv = KVCacheManager(PageGeometry(21, 16), max_sequences=6, host_blocks=4)
    rows = kv.create(2)
    run(kv, rows, [40, 20])
    kv.register(rows[0], chain_of(range(40)))
    return kv


@pytest.fixture
def kv() -> KVCacheManager:
    return manager()


def assert_refused(kv: KVCacheManager, kind: type[KvError], call) -> None:
    before = kv.digest()
    with pytest.raises(kind):
        call()
    assert kv.digest() == before
    kv.check("full")


@pytest.mark.parametrize("window", [1.5, float("nan"), 2**70, 2**63 - 1, "x", True, None])
def test_windows_that_are_none(kv: KVCacheManager, window) -> None:
    assert_refused(kv, InvalidWindow, lambda: kv.create(1, window=window))
    assert_refused(kv, InvalidWindow, lambda: kv.admit(5, window=window))
    assert_refused(kv, InvalidWindow, lambda: kv.resume(PreemptedSequence(3, 1, window, None), 9))


@pytest.mark.parametrize("tenant", [5, b"x", [], np.array([1, 2])])
def test_tenants_that_are_no_names(kv: KVCacheManager, tenant) -> None:
    assert_refused(kv, InvalidTenant, lambda: kv.create(1, tenant=tenant))
    assert_refused(kv, InvalidTenant, lambda: kv.admit(5, tenant=tenant))
    assert_refused(kv, InvalidTenant, lambda: kv.set_quota(tenant, 3))
    assert_refused(kv, InvalidTenant, lambda: kv.set_quota(None, 3))


@pytest.mark.parametrize("epoch", [2.0, 1.5, True, "x", None, float("nan"), [2], np.array([1, 2])])
def test_epochs_that_are_no_numbers(kv: KVCacheManager, epoch) -> None:
    with kv.begin_step(kv.create(1), 1) as step:
        step.commit()
    assert_refused(kv, EpochOutOfOrder, lambda: kv.complete(epoch))
    kv.complete(np.int64(step.epoch))


@pytest.mark.parametrize("page", [15.5, True, "x", None, 2**70, float("nan")])
def test_pages_that_are_no_numbers(kv: KVCacheManager, page) -> None:
    assert_refused(kv, PageNotOwned, lambda: kv.quarantine(page))


@pytest.mark.parametrize("ragged", [[[1], [2, 3]], np.zeros((0, 3))])
def test_vectors_that_are_not_flat(kv: KVCacheManager, ragged) -> None:
    assert_refused(kv, UnknownSequence, lambda: kv.release(ragged))
    assert_refused(kv, InvalidLength, lambda: kv.begin_step([], ragged))
    assert_refused(kv, InvalidLength, lambda: kv.admit(ragged))


@pytest.mark.parametrize("left", [(2**70, 1), (3, 2**70), (3, -1), (-3, 1), (1.5, 1)])
def test_preempted_sequences_made_by_hand(kv: KVCacheManager, left) -> None:
    assert_refused(kv, InvalidLength, lambda: kv.resume(PreemptedSequence(*left, 0, None), 10))


def test_a_level_of_check_that_does_not_exist(kv: KVCacheManager) -> None:
    with pytest.raises(KvConfigError):
        kv.check("deep")


def test_hits_of_another_manager_copies_and_other_pins(kv: KVCacheManager) -> None:
    fresh = kv.create(1)[0]
    mine, other = kv.lookup_and_pin(chain_of(range(40))), manager().lookup_and_pin(chain_of(range(40)))
    pins = kv.pin(kv.fork(int(kv.create(1)[0]))[0])
    for claim in (other, copy.copy(mine), pins, None):
        assert_refused(kv, ForeignClaim, lambda claim=claim: kv.attach(fresh, claim))
        if claim is not None:
            assert_refused(kv, ForeignClaim, lambda claim=claim: kv.admit(60, hits=[claim]))
    assert_refused(kv, ForeignClaim, copy.copy(mine).drop)
    assert other.is_open
    assert kv.attach(fresh, mine) is None


def test_swaps_of_another_manager_and_copies(kv: KVCacheManager) -> None:
    [row] = kv.create(1)
    run(kv, [row], 20)
    mine, there = kv.swap_out(row), manager()
    [other_row] = there.create(1)
    run(there, [other_row], 20)
    for plan in (there.swap_out(other_row), copy.copy(mine)):
        assert_refused(kv, ForeignClaim, lambda plan=plan: kv.confirm_swap(plan))
        assert_refused(kv, ForeignClaim, lambda plan=plan: kv.cancel_swap(plan))
    kv.confirm_swap(mine)
    back = kv.swap_in(row)
    assert_refused(kv, ForeignClaim, lambda: kv.confirm_swap(copy.copy(back)))
    kv.confirm_swap(back)
    kv.check("full")


def test_a_tenant_without_a_quota_is_charged_from_its_first_page(kv: KVCacheManager) -> None:
    [row] = kv.create(1, tenant="a")
    run(kv, [row], 20)
    kv.check("full")
    assert len(kv.fork(row, 0)) == 0
    kv.check("full")
    kv.set_quota("a", 2)
    assert kv.begin_step([row], 20).reason == "quota"


def test_a_page_that_a_rollback_needs_is_not_quarantined() -> None:
    kv = KVCacheManager(PageGeometry(21, 16), max_sequences=6)
    [row] = kv.create(1)
    run(kv, [row], 16)
    kv.register(row, chain_of(range(16)))
    kv.truncate(row, 10)
    [beam] = kv.fork(row)
    with kv.begin_step([row, beam], 1) as step:
        assert_refused(kv, PageNotOwned, lambda: kv.quarantine(int(step.copies.source[0])))
    kv.check("full")


def test_narrow_numpy_integers_do_not_wrap() -> None:
    for sizes in ((np.int32(2**28), np.int32(16)), (np.int32(2**30), 16)):
        with pytest.raises(PagedSlotOverflow):
            PageGeometry(*sizes)
    assert PageGeometry(np.int8(100), np.int16(16_384)).num_slots == 100 * 16_384
    kv = KVCacheManager(PageGeometry(9, 16), max_sequences=np.int8(100), host_blocks=np.int8(100))
    assert kv.stats().num_host_pages_free == 100
    cache = LatentCacheGeometry(np.int32(2**30), np.int32(64), np.int32(576))
    assert cache.needs_64_bit_offsets
    assert cache.latent_element_offset(np.int32(2**29), 3, 5) == (2**29 * 64 + 3) * 576 + 5
    for block in (1.5, True, "x"):
        with pytest.raises(InvalidGeometry):
            cache.latent_element_offset(block, 0, 0)
    offset = token_major_element_offset(2**30, 0, 0, kv_num_heads=np.int32(8), head_size=np.int32(128))
    assert offset == 2**40


@pytest.mark.parametrize("size", [True, 1.5, "x", None, 0, -1, 2**40])
def test_buffers_of_no_size(size) -> None:
    for sizes in ((size, 2, 2), (2, size, 2), (2, 2, size)):
        with pytest.raises(InvalidGeometry):
            IndexPlanBuffers(*sizes)


@pytest.mark.parametrize("pad", [2**40, 1.5, "x", None])
def test_padding_that_is_no_page(kv: KVCacheManager, pad) -> None:
    with pytest.raises(InvalidGeometry):
        IndexPlanBuffers(2, 2, 2, pad=pad)
    assert_refused(kv, InvalidGeometry, lambda: PagedIndexPlan.build(kv.view(), [], pad=pad))


@pytest.mark.parametrize("width", [0, -1, 1.5, "x"])
def test_tables_of_no_width(kv: KVCacheManager, width) -> None:
    assert_refused(kv, InvalidGeometry, lambda: PagedIndexPlan.build(kv.view(), [], max_blocks=width))


def test_memory_off_the_word_boundary() -> None:
    with pytest.raises(InvalidGeometry):
        IndexPlanBuffers(2, 2, 2, memory=memoryview(bytearray(4_097))[1:])


def test_the_first_plan_writes_everything_even_when_it_is_empty(kv: KVCacheManager) -> None:
    """Uploading only dirty ranges must never leave a device row without its padding."""
    buffers = IndexPlanBuffers(4, 8, 4)
    [row] = kv.create(1)
    for _ in range(2):
        for rows, whole in (([], True), ([], False), ([row], False)):
            with kv.begin_step(rows, 1) as step:
                step.plan(buffers)
            dirty = buffers.dirty()
            assert (len(dirty.rows) == 4 and dirty.bulk and set(dirty.last) == {4}) == whole
        buffers.invalidate()
        assert len(buffers.dirty().rows) == 4


@pytest.mark.parametrize("count", [1.5, "x", -1, 41, None, True])
def test_chains_cut_at_no_length(count) -> None:
    chain = chain_of(range(40))
    with pytest.raises(InvalidLength):
        chain.truncate(count)
    with pytest.raises(InvalidLength):
        chain.extend([[1], [2, 3]])
    assert (chain.num_tokens, len(chain.digests)) == (40, 2)


def _queue_twice(state) -> None:
    queue = state.pool.clean
    queue._ring[queue._head] = queue._ring[queue._head + 1]


def _handle_of_another_row(state) -> None:
    state.table.handle[1] += 1
    state.table.ready[1] += 1


def _duplicate_of_nothing(state) -> None:
    [pages] = state.prefix.duplicates.values()
    state.prefix.digest_of[pages[0]] = b"x" * 32


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (_queue_twice, "I4"),
        (lambda state: state.pool.clean.__setattr__("count", state.pool.clean.count - 1), "I1"),
        (lambda state: state.pool.clean._stamp.__setitem__(state.pool.clean.entries()[0], -1), "I4"),
        (_handle_of_another_row, "I11"),
        (lambda state: state.table.generation.__setitem__(0, 9), "I11"),
        (lambda state: state.table.version.__setitem__(0, 2**40), "I11"),
        (_duplicate_of_nothing, "I9"),
    ],
)
def test_check_sees_what_was_spoilt(spoil, name: str) -> None:
    kv = KVCacheManager(PageGeometry(21, 16), max_sequences=4)
    rows = kv.create(2)
    run(kv, rows, 20)
    for row in rows:
        kv.register(row, chain_of(range(20)))
    kv.check("full")
    spoil(kv._state)
    with pytest.raises(InvariantViolation, match=name):
        kv.check("full")


def test_attached_pages_are_not_read_while_a_step_writes_them() -> None:
    """A hit on pages that were registered at commit: an offload must wait until they are complete."""
    kv = KVCacheManager(PageGeometry(21, 16), max_sequences=4)
    first, second = kv.create(2)
    with kv.begin_step([first], 40) as step:
        step.commit()
    kv.register(first, chain_of(range(40)))
    assert kv.attach(second, kv.lookup_and_pin(chain_of(range(40)))) is None
    [third] = kv.admit(60, hits=[kv.lookup_and_pin(chain_of(range(40)))])
    for row in (first, second, third):
        assert len(kv.pin(row).pages) == 0
    kv.complete(step.epoch)
    for row in (first, second, third):
        assert len(kv.pin(row).pages) == 2
    kv.check("full")


def test_a_hit_takes_no_page_that_is_promised() -> None:
    """Eight pages, three of them cached, all promised: a row that needs nothing but its hit waits."""
    kv = KVCacheManager(PageGeometry(9, 16), max_sequences=4)
    row = kv.create(1)
    run(kv, row, 48)
    kv.register(row[0], chain_of(range(48)))
    kv.release(row)
    promised = kv.admit(8 * 16)
    hit = kv.lookup_and_pin(chain_of(range(49)))
    assert kv.admit(48, hits=[hit]) == CapacityDeferred(0, 0, 0)
    hit.drop()
    run(kv, promised, 8 * 16)
    kv.check("full")


def test_what_the_manager_reads_again_cannot_be_written(kv: KVCacheManager) -> None:
    [row, other] = kv.create(2)
    with kv.begin_step([row, other], 1) as step:
        step.commit()
    kv.complete(step.epoch)
    hit, swap = kv.lookup_and_pin(chain_of(range(40))), kv.swap_out(row)
    for array in (step.handles, step.slots, step.new_lens, hit.pages, swap.device_pages, swap.host_pages):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
