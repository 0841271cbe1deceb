"""Fork, copy on write, promises, quotas, preemption, statistics, digests, formulas."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kv import (
    CacheKey,
    CapacityDeferred,
    IndexPlanBuffers,
    KVCacheManager,
    LatentCacheGeometry,
    PageGeometry,
    PrefixChain,
    UnserviceableRequest,
    bucket_columns,
    latent_element_offset,
    token_major_element_offset,
)
from paged_kv.errors import InvariantViolation
from paged_kv.testing import HistoryCache

KEY = CacheKey(model="m", dtype="float16", layout="LATENT")


def manager(usable: int = 16, **options) -> KVCacheManager:
    return KVCacheManager(
        PageGeometry(usable + 1, 16), max_sequences=8, max_blocks_per_sequence=16, **options
    )


def chain_of(tokens, key: CacheKey = KEY) -> PrefixChain:
    chain = PrefixChain(key, 16)
    chain.extend(tokens)
    return chain


def run(kv: KVCacheManager, rows, lengths) -> None:
    with kv.begin_step(rows, lengths) as step:
        step.commit()
    kv.complete(step.epoch)


def test_a_forked_row_copies_its_tail_before_it_writes() -> None:
    kv, cache = manager(), HistoryCache(17, 16)
    row = kv.create(1)[0]
    first = list(range(20))
    with kv.begin_step([row], 20) as step:
        cache.write(step.plan(), [first])
        step.commit()
    beam = kv.fork(row)[0]
    assert kv.stats().num_pages_in_use == 2
    tokens = {beam: [*first, 100], row: [*first, 200]}
    with kv.begin_step([beam], 1) as step:
        assert [a.tolist() for a in (step.copies.source, step.copies.target, step.copies.tokens)] == [
            [2],
            [3],
            [4],
        ]
        assert len(step.copies) == 1
        cache.copy(step.copies)
        cache.write(step.plan(), [tokens[beam]])
        step.commit()
    with kv.begin_step([row, beam], [1, 0]) as step:
        assert step.copies is None
        plan = step.plan()
        cache.write(plan, [tokens[row], tokens[beam]])
        assert cache.mismatch(plan, [tokens[row], tokens[beam]], [0, 0]) is None
        step.commit()
    kv.check("full")


def test_when_all_owners_write_the_longest_keeps_the_page() -> None:
    kv = manager()
    row = kv.create(1)[0]
    run(kv, [row], 20)
    short = kv.fork(row, at=18)[0]
    with kv.begin_step([row, short], 1) as step:
        assert step.copies.source.tolist() == [2]
        assert step.copies.tokens.tolist() == [2]
        assert step.plan().block_table.tolist() == [[1, 2], [1, 3]]
        step.commit()


def test_a_rollback_after_the_launch_hands_back_untouched_tokens() -> None:
    """The longer row is listed first: had the later, shorter one kept the page, it would have spoiled it."""
    kv, cache = manager(), HistoryCache(17, 16)
    row = kv.create(1)[0]
    tokens = list(range(15))
    with kv.begin_step([row], 15) as step:
        cache.write(step.plan(), [tokens])
        step.commit()
    short = kv.fork(row, at=4)[0]
    with kv.begin_step([row, short], [1, 5]) as step:
        cache.copy(step.copies)
        cache.write(step.plan(), [[*tokens, 1], [*tokens[:4], *[9] * 5]])
    with kv.begin_step([row], 0) as step:
        assert cache.mismatch(step.plan(), [tokens], [0]) is None


def test_a_registered_page_is_copied_or_unregistered_before_it_is_written() -> None:
    kv = manager()
    row = kv.create(1)[0]
    run(kv, [row], 32)
    kv.register(row, chain_of(range(32)))
    kv.truncate(row, 20)
    with kv.begin_step([row], 1) as step:
        assert step.copies is None
        step.commit()
    assert kv.stats().cached_digests == 1
    kv.truncate(row, 10)
    other = kv.create(1)[0]
    hit = kv.lookup_and_pin(chain_of(range(17)))
    with kv.begin_step([row], 1) as step:
        assert step.copies.source.tolist() == hit.pages.tolist()
        step.commit()
    assert kv.attach(other, hit) is None
    assert kv.stats().cached_digests == 1
    kv.check("full")


def test_a_row_without_a_promise_takes_only_what_is_left() -> None:
    kv = manager(8)
    [promised] = kv.admit(5 * 16)
    assert kv.stats().num_pages_promised == 5
    [free] = kv.create(1)
    assert kv.begin_step([free], 4 * 16) == CapacityDeferred(needed=4, available=3, after_fence=3)
    run(kv, [free], 3 * 16)
    run(kv, [promised], 5 * 16)
    assert kv.stats().num_pages_promised == 0
    kv.check("full")


def test_admission_leaves_the_watermark() -> None:
    kv = manager(8, watermark=2)
    assert kv.admit(7 * 16) == UnserviceableRequest(7, 6, "watermark")
    kv.admit(4 * 16)
    assert kv.admit(3 * 16) == CapacityDeferred(3, 2, 2, "watermark")
    run(kv, kv.create(1), 4 * 16)


def test_a_quota_bounds_a_tenant_and_nobody_else() -> None:
    kv = manager(16)
    kv.set_quota("acme", 4)
    assert kv.admit(5 * 16, tenant="acme") == UnserviceableRequest(5, 4, "quota")
    [row] = kv.admit(3 * 16, tenant="acme")
    assert kv.admit(2 * 16, tenant="acme") == CapacityDeferred(2, 1, 1, "quota")
    [other] = kv.create(1, tenant="acme")
    assert kv.begin_step([other], 2 * 16) == CapacityDeferred(2, 1, 1, "quota")
    assert kv.begin_step([other], 5 * 16) == UnserviceableRequest(5, 4, "quota")
    run(kv, [other], 16)
    run(kv, kv.admit(9 * 16, tenant="other"), 9 * 16)
    kv.set_quota("acme", 1)
    with kv.begin_step([row], 0) as step:
        step.commit()
    kv.complete(step.epoch)
    kv.set_quota("acme", 4)
    kv.check("full")
    run(kv, [row], 40)
    kv.truncate(other, 0)
    kv.check("full")
    kv.release([row, other])
    kv.check("full")
    kv.set_quota("acme", None)
    assert not isinstance(kv.admit(5 * 16, tenant="acme"), (CapacityDeferred, UnserviceableRequest))
    kv.check("full")


def test_quota_counts_hits_and_swaps() -> None:
    kv = manager(16, host_blocks=4)
    kv.set_quota("acme", 3)
    [row] = kv.create(1, tenant="acme")
    run(kv, [row], 33)
    kv.register(row, chain_of(range(33)))
    [other] = kv.create(1, tenant="acme")
    hit = kv.lookup_and_pin(chain_of(range(33)))
    assert kv.attach(other, hit) == CapacityDeferred(2, 0, 0, "quota")
    hit.drop()
    kv.confirm_swap(kv.swap_out(row))
    kv.check("full")
    run(kv, [other], 16)
    assert kv.swap_in(row) == CapacityDeferred(3, 2, 2, "quota")
    kv.release(other)
    kv.confirm_swap(kv.swap_in(row))
    kv.check("full")


def test_shared_pages_do_not_come_back_into_a_promise() -> None:
    kv = manager(6)
    [row] = kv.admit(4 * 16)
    run(kv, [row], 4 * 16)
    beam = kv.fork(row)[0]
    kv.truncate(row, 16)
    assert kv.stats().num_pages_promised == 0
    kv.release(beam)
    [row2] = kv.admit(4 * 16)
    run(kv, [row2], 4 * 16)
    kv.truncate(row2, 16)
    assert kv.stats().num_pages_promised == 3
    kv.check("full")


def test_reclaimable_pages_are_those_that_nobody_else_holds() -> None:
    kv = manager()
    row, other = kv.create(2)
    run(kv, [row, other], [40, 17])
    kv.fork(row, at=32)
    assert kv.reclaimable_pages([row, other]).tolist() == [1, 2]


def test_a_sequence_preempted_often_comes_back_with_its_whole_promise() -> None:
    kv = manager(16, max_preemptions=1)
    [row] = kv.admit(10 * 16, promise_lens=16, tenant="acme", window=64)
    for expected in (1, 2):
        run(kv, [row], 8)
        [left] = kv.preempt(row)
        assert (left.preemptions, left.window, left.tenant) == (expected, 64, "acme")
        [row] = kv.resume(left, 10 * 16)
        assert kv.stats().num_pages_promised == (1 if expected == 1 else 10)
    assert kv.stats().preemptions_total == 2


def test_swapping_brings_the_tokens_back() -> None:
    kv, cache = manager(4, host_blocks=4), HistoryCache(5, 16, 4)
    row, other = kv.create(2)
    tokens = list(range(37))
    with kv.begin_step([row], 37) as step:
        cache.write(step.plan(), [tokens])
        step.commit()
    kv.complete(step.epoch)
    out = kv.swap_out(row)
    cache.swap(out)
    kv.confirm_swap(out)
    with kv.begin_step([other], 60) as step:
        cache.write(step.plan(), [[7] * 60])
        step.commit()
    kv.complete(step.epoch)
    assert kv.swap_in(row) == CapacityDeferred(3, 0, 0)
    kv.release(other)
    back = kv.swap_in(row)
    cache.swap(back)
    kv.confirm_swap(back)
    with kv.begin_step([row], 0) as step:
        assert cache.mismatch(step.plan(), [tokens], [0]) is None
    kv.check("full")


def test_digests_are_what_they_were() -> None:
    """Golden values: a change here makes every cache of another process or version miss."""
    key = CacheKey("m", "float16", "LATENT", layers="0-29", adapter="a", multimodal=("i1", "i2"), tenant="t")
    chain = PrefixChain(key, 16)
    chain.extend(range(32))
    assert key.root(16).hex() == GOLDEN_ROOT
    tokens = np.arange(32, dtype="<i4").tobytes()
    first = hashlib.sha256(key.root(16) + tokens[:64]).digest()
    assert chain.digests == [first, hashlib.sha256(first + tokens[64:]).digest()]
    assert [digest.hex() for digest in chain.digests] == GOLDEN_BLOCKS


GOLDEN_ROOT = "0ac609f6dc79ebb85874f7ac4ede3f3b9bcf1fa69c39c3ac8537b2b55831b087"
GOLDEN_BLOCKS = [
    "bb9ddfab24e9ca04ed2d562f83790e574f68485e9089d1200f3693441a90b5c5",
    "fa62e672096dd47c6538e67add1ec8cf493d8051baedd2e639959b56b46c3e8f",
]


def test_statistics_in_prometheus_text() -> None:
    kv = manager(4)
    run(kv, kv.create(1), 20)
    text = kv.stats().prometheus()
    assert "# TYPE paged_kv_num_pages_in_use gauge\npaged_kv_num_pages_in_use 2\n" in text
    assert "# TYPE paged_kv_steps_total counter\npaged_kv_steps_total 1\n" in text
    assert text.count("# TYPE") == len(text.splitlines()) // 2


def test_the_same_trace_gives_the_same_pages_and_events() -> None:
    def trace() -> tuple[str, list[tuple[str, int]]]:
        kv, told = manager(6), []
        kv.add_event_sink(lambda event: told.append((event.kind, event.page)))
        for start in range(5):
            row = kv.create(1)[0]
            run(kv, [row], 40)
            kv.register(row, chain_of(range(start, start + 40)))
            kv.release(row)
        return kv.digest(), told

    assert trace() == trace()


def test_eight_emissions_change_nothing() -> None:
    kv = manager()
    buffers = IndexPlanBuffers(4, 64, 16)
    rows = kv.create(3)
    run(kv, rows, [20, 1, 30])
    with kv.begin_step(rows, 2) as step:
        before = (kv.digest(), kv.stats())
        for turn in range(8):
            step.plan(buffers if turn % 2 else None)
        assert (kv.digest(), kv.stats()) == before


def test_dirty_ranges_cover_every_change() -> None:
    kv = manager(60)
    buffers = IndexPlanBuffers(6, 64, 16)
    mirror = buffers.block_table.copy()
    rows, rng = kv.create(6), np.random.default_rng(2)
    for _ in range(40):
        batch = rng.permutation(rows)[: rng.integers(0, 7)] if rng.random() < 0.3 else rows
        step = kv.begin_step(batch, rng.integers(0, 4, len(batch)))
        with step:
            step.plan(buffers)
            step.commit()
        dirty = buffers.dirty()
        for row, first, last in zip(dirty.rows, dirty.first, dirty.last, strict=True):
            mirror[row, first:last] = buffers.block_table[row, first:last]
        assert np.array_equal(mirror, buffers.block_table)
        assert dirty.bulk == (2 * len(dirty.rows) >= max(1, len(batch)))


def test_buffers_live_in_the_callers_memory() -> None:
    memory = bytearray(IndexPlanBuffers.bytes_for(2, 8, 8))
    buffers = IndexPlanBuffers(2, 8, 8, memory=memory)
    kv = manager()
    with kv.begin_step(kv.create(1), 3) as step:
        step.plan(buffers)
        step.commit()
    words = np.frombuffer(memory, dtype=np.int32)
    assert words[0] == 1
    assert words[16:19].tolist() == [16, 17, 18]
    assert buffers.dirty().rows.tolist() == [0, 1]
    buffers.invalidate()
    assert (buffers.block_table == -1).all()
    assert buffers.dirty().rows.tolist() == [0, 1]


def test_buffers_can_pad_with_something_else() -> None:
    kv = manager()
    buffers = IndexPlanBuffers(3, 64, 16, pad=0)
    rows = kv.create(3)
    for size in (3, 1, 2):
        with kv.begin_step(rows[:size], 17) as step:
            plan = step.plan(buffers)
            step.commit()
        assert (buffers.block_table >= 0).all()
        assert (buffers.block_table[size:] == 0).all()
        assert (plan.block_table > 0).sum() == int(kv.view().n_blocks[:size].sum())


@pytest.mark.parametrize(
    ("columns", "bucket"), [(0, 8), (1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (1_000, 1_024)]
)
def test_columns_are_bucketed_to_powers_of_two(columns: int, bucket: int) -> None:
    assert bucket_columns(columns) == bucket


@settings(deadline=None, max_examples=50)
@given(
    slot=st.integers(0, 2**31 - 1),
    head=st.integers(0, 127),
    heads=st.integers(1, 128),
    size=st.sampled_from([64, 128, 192, 576]),
)
def test_offsets_count_in_64_bits(slot: int, head: int, heads: int, size: int) -> None:
    head %= heads
    exact = (slot * heads + head) * size + size - 1
    assert token_major_element_offset(slot, head, size - 1, kv_num_heads=heads, head_size=size) == exact
    slots = np.array([slot], dtype=np.int32)
    array = token_major_element_offset(slots, head, size - 1, kv_num_heads=heads, head_size=size)
    assert array.dtype == np.int64
    assert array[0] == exact
    assert latent_element_offset(slot, 5, latent_dim=size) == slot * size + 5
    assert latent_element_offset(slots, 5, latent_dim=size)[0] == slot * size + 5


def test_latent_and_token_major_agree() -> None:
    geometry = LatentCacheGeometry(8, 32, 192, v_head_size=128, rotary_dim=64, rotary_offset=128)
    cache = np.arange(geometry.num_elements).reshape(8, 32, 1, 192)
    assert geometry.latent_element_offset(3, 5, 150) == cache[3, 5, 0, 150]


BROKEN = {
    "I1": lambda state: setattr(state.pool, "num_live", 99),
    "I2": lambda state: state.pool.claims.__setitem__(1, 2),
    "I3": lambda state: state.pool.claims.__setitem__(5, 1),
    "I4": lambda state: state.pool.clean._ring.__setitem__(3, 1),
    "I5": lambda state: state.table.cells.__setitem__((0, 0), 99),
    "I6": lambda state: (state.table.cells.__setitem__((0, 1), 1), state.table.tail_shared.fill(True)),
    "I7": lambda state: state.table.n_blocks.__setitem__(0, 3),
    "I8": lambda state: state.table.settled.__setitem__(0, 99),
    "I9": lambda state: state.prefix.page_of.clear(),
    "I10": lambda state: setattr(state.epochs, "completed", 9),
    "I11": lambda state: state.table.ready.__setitem__(0, -1),
    "I12": lambda state: setattr(state.pool, "_num_shared", 3),
    "I13": lambda state: setattr(state.ledger, "outstanding", 3),
    "I17": lambda state: (state.pool.claims.__setitem__(2, 2), state.pool.claims.__setitem__(1, 1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_sees_each_broken_invariant(name: str) -> None:
    kv = manager()
    row = kv.create(1)[0]
    run(kv, [row], 20)
    kv.register(row, chain_of(range(20)))
    kv.check("full")
    BROKEN[name](kv._state)
    with pytest.raises(InvariantViolation) as violation:
        kv.check("full")
    assert violation.value.numbers["invariant"] == name


def test_a_hash_that_collides_often_never_gives_a_wrong_page() -> None:
    def weak(data: bytes) -> bytes:
        return bytes([hashlib.sha256(data).digest()[0] % 8])

    kv, cache, rng = manager(12, verify_tokens=True), HistoryCache(13, 16), np.random.default_rng(4)
    hits = 0
    for _ in range(300):
        tokens = [int(rng.integers(2))] * 16 + [int(rng.integers(2))] * 16 + [7] * int(rng.integers(1, 20))
        chain = PrefixChain(KEY, 16, hash_function=weak)
        chain.extend(tokens)
        hit = kv.lookup_and_pin(chain)
        hits += len(hit.pages)
        row = kv.admit(len(tokens), hits=[hit])
        with kv.begin_step(row, len(tokens) - hit.num_tokens) as step:
            plan = step.plan()
            cache.write(plan, [tokens])
            assert cache.mismatch(plan, [tokens], [0]) is None
            step.commit()
        kv.complete(step.epoch)
        kv.register(row[0], chain)
        kv.release(row)
        kv.check("full")
    assert hits > 100


def test_a_parent_that_comes_back_finds_its_child_again() -> None:
    kv = manager(4, verify_tokens=True)
    chain = chain_of(range(33))
    rows = kv.create(2)
    run(kv, rows, [32, 16])
    kv.register(rows[0], chain)
    kv.truncate(rows[0], 10)
    run(kv, rows[:1], 1)
    kv.register(rows[1], chain)
    with kv.lookup_and_pin(chain) as hit:
        assert hit.pages.tolist() == [3, 2]


def test_the_history_cache_sees_a_page_that_two_rows_write() -> None:
    """The checker itself: point one row's table at the other's page, and it must say where."""
    kv, cache = manager(), HistoryCache(17, 16)
    assert kv.geometry.num_blocks == 17
    rows = kv.create(2)
    tokens = [[1] * 20, [2] * 20]
    with kv.begin_step(rows, 20) as step:
        plan = step.plan()
        aliased = plan.block_table.copy()
        aliased[1, 1] = aliased[0, 1]
        cache.write(plan, tokens)
        assert cache.mismatch(plan, tokens, [0, 0]) is None
        assert cache.mismatch(plan._replace(block_table=aliased), tokens, [0, 0]) == (1, 16)
        assert cache.mismatch(plan, [tokens[0], [2] * 19 + [3]], [0, 0]) == (1, 19)
        step.commit()
