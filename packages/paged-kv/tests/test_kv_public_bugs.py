"""Bugs that public engines had in their page managers, each as the input that would show it here.

The numbers are those of the table of public bugs that the project's issue refers to.
"""

import gc
import itertools
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
from paged_kv import (
    CacheKey,
    CapacityDeferred,
    IndexPlanBuffers,
    KVCacheManager,
    PadPolicy,
    PagedIndexPlan,
    PagedRequest,
    PageGeometry,
    PrefixChain,
    UnserviceableRequest,
)
from paged_kv.errors import (
    InvalidGeometry,
    PagedSlotOverflow,
    PagedTableTooNarrow,
    PageNotOwned,
    Reentrancy,
    SharedPageNotSwappable,
    StaleSequenceHandle,
    StorageAlreadyOwned,
    UnverifiedHash,
)
from paged_kv.testing import HistoryCache, history_of

KEY = CacheKey(model="m", dtype="float16", layout="LATENT")


def manager(usable: int, rows: int = 8, columns: int = 16, **options) -> KVCacheManager:
    size = options.pop("block_size", 16)
    return KVCacheManager(
        PageGeometry(usable + 1, size), max_sequences=rows, max_blocks_per_sequence=columns, **options
    )


def chain_of(tokens, key: CacheKey = KEY, size: int = 16, **options) -> PrefixChain:
    chain = PrefixChain(key, size, **options)
    chain.extend(tokens)
    return chain


def run(kv: KVCacheManager, rows, lengths, *, done: bool = True) -> int:
    with kv.begin_step(rows, lengths) as step:
        step.plan(allow_window_holes=True)
        step.commit()
    if done:
        kv.complete(step.epoch)
    return step.epoch


def cached(kv: KVCacheManager, tokens) -> PrefixChain:
    """Compute a prompt, register it, and release the row."""
    row = kv.create(1)
    run(kv, row, len(tokens))
    chain = chain_of(tokens)
    kv.register(row[0], chain)
    kv.release(row)
    return chain


def test_01_a_hit_is_pinned_before_anyone_can_take_its_pages() -> None:
    kv = manager(3)
    chain = cached(kv, range(49 - 1))
    chain.extend([7])
    hit = kv.lookup_and_pin(chain)
    assert len(hit.pages) == 3
    other = kv.create(1)
    assert isinstance(kv.begin_step(other, 48), CapacityDeferred)
    hit.drop()
    with kv.begin_step(other, 48) as step:
        assert set(step.plan().block_table[0]) == {1, 2, 3}


def test_02_the_second_release_is_refused_and_holes_are_not_given_back() -> None:
    kv = manager(6)
    row = kv.create(1, window=16)
    run(kv, row, 64)
    assert kv.advance_window(row) == 3
    kv.release(row)
    before = kv.digest()
    with pytest.raises(StaleSequenceHandle):
        kv.release(row)
    assert kv.digest() == before
    assert sorted(kv._state.pool.clean.entries().tolist()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("order", list(itertools.permutations(["commit", "register", "release"])))
def test_03_no_order_of_commit_register_release_leaks(order: tuple[str, ...]) -> None:
    kv = manager(4)
    row = kv.create(1)
    step = kv.begin_step(row, 32)
    chain = chain_of(range(32))
    actions = {
        "commit": lambda: step.commit(),
        "register": lambda: kv.register(row[0], chain),
        "release": lambda: kv.release(row),
    }
    for name in order:
        try:
            actions[name]()
        except ValueError:
            continue
        assert kv.stats().num_pages_in_use <= 4
        kv.check("full")
    if step.is_open:
        step.rollback()
    kv.check("full")


def test_04_a_page_in_transfer_returns_exactly_once_and_only_after_the_transfer() -> None:
    kv = manager(2)
    row = kv.create(1)
    run(kv, row, 32)
    pins = kv.pin(row[0])
    kv.release(row)
    assert isinstance(kv.begin_step(kv.create(1), 16), CapacityDeferred)
    pins.drop()
    assert kv._state.pool.clean.entries().tolist() == [2, 1]
    kv.check("full")


def test_05_giving_up_after_a_lookup_leaves_no_pin() -> None:
    kv = manager(4)
    chain = cached(kv, range(33))
    with kv.lookup_and_pin(chain) as hit:
        assert len(hit.pages) == 2
        assert isinstance(kv.admit(200, hits=[hit]), UnserviceableRequest)
    assert not kv._state.open_pins
    assert (kv.view().claims >> 32 & 0xFFFF).sum() == 0
    kv.check("full")


def test_06_an_idle_pool_adds_up() -> None:
    kv = manager(12)
    rng = np.random.default_rng(3)
    for _ in range(50):
        rows = kv.create(int(rng.integers(1, 4)))
        step = kv.begin_step(rows, rng.integers(1, 40, len(rows)))
        if not isinstance(step, CapacityDeferred):
            step.plan()
            step.commit() if rng.random() < 0.5 else step.rollback()
            kv.complete(step.epoch)
        kv.release(rows)
    stats = kv.stats()
    assert stats.num_pages_clean + stats.num_pages_evictable + stats.num_pages_fenced + 1 == stats.num_pages


def test_07_a_rejected_draft_gives_its_tail_page_back() -> None:
    kv = manager(2)
    row = kv.create(1)
    run(kv, row, 14)
    with kv.begin_step(row, 5) as step:
        step.plan()
        step.commit_prefix(0)
    kv.complete(step.epoch)
    assert kv.stats().num_pages_free == 1
    assert kv.view().seq_len[0] == 14


def test_08_tokens_and_pages_are_counted_apart() -> None:
    kv = manager(10, block_size=64)
    rows = kv.create(2)
    run(kv, rows, [65, 64])
    stats = kv.stats()
    assert (stats.tokens_total, stats.num_pages_in_use) == (129, 3)
    assert int(kv.view().n_blocks.sum()) == 3
    assert int(kv.view().seq_len.sum()) == 129


def test_09_a_parent_is_not_evicted_while_a_child_lives() -> None:
    kv = manager(4)
    chain = cached(kv, range(49))
    row = kv.create(1)
    assert kv.attach(row[0], kv.lookup_and_pin(chain)) is None
    other = kv.create(1)
    run(kv, other, 16)
    assert isinstance(kv.begin_step(other, 16), CapacityDeferred)
    assert kv.view().cells[row[0] & 0xFF, :3].tolist() == kv._state.prefix.find(chain, 3).tolist()


def test_10_an_event_callback_that_calls_back_gets_a_typed_error() -> None:
    kv = manager(4)
    kv.add_event_sink(lambda event: kv.reset_prefix_cache())
    cached(kv, range(16))
    assert [type(error) for error in kv.sink_errors] == [Reentrancy]
    kv.check("full")
    assert kv.stats().cached_digests == 1


def test_11_counters_agree_with_a_recount() -> None:
    kv = manager(8)
    rows = kv.create(2)
    run(kv, rows, [40, 20])
    kv.fork(rows[0], 2)
    kv._state.pool.counters.frees += 1
    with pytest.raises(RuntimeError, match="I12"):
        kv.check("full")


def test_12_one_cache_has_one_authority() -> None:
    storage = ("gpu0", 0x7F00)
    first = manager(4, storage=storage)
    with pytest.raises(StorageAlreadyOwned):
        manager(4, storage=storage)
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None
    manager(4, storage=storage)


def test_13_a_page_freed_under_a_step_is_not_offered_before_the_step_completes() -> None:
    kv = manager(2)
    first, second = kv.create(2)
    epoch = run(kv, [first], 32, done=False)
    kv.release(first)
    refused = kv.begin_step([second], 16)
    assert refused == CapacityDeferred(needed=1, available=0, after_fence=2)
    kv.complete(epoch)
    with kv.begin_step([second], 16) as step:
        step.commit()


def test_14_a_window_is_freed_on_settled_tokens_only() -> None:
    """Window 128, block 32: block 0 may go when 160 tokens are settled, not when the 160th is in flight."""
    kv = manager(8, block_size=32)
    row = kv.create(1, window=128)
    run(kv, row, 158)
    assert kv.advance_window(row) == 0
    run(kv, row, 1)
    assert kv.advance_window(row) == 0
    epoch = run(kv, row, 1, done=False)
    assert kv.view().seq_len[0] == 160
    assert kv.advance_window(row) == 0
    assert kv.view().cells[0, 0] == 1
    kv.complete(epoch)
    assert kv.advance_window(row) == 1
    assert kv.view().cells[0, 0] == -1


def test_15_pages_of_a_row_that_ends_inside_a_batch_of_steps_wait_for_the_last() -> None:
    kv = manager(3)
    row, other = kv.create(2)
    epochs = [run(kv, [row], 16, done=False) for _ in range(3)]
    kv.release(row)
    for epoch in epochs:
        assert isinstance(kv.begin_step([other], 16), CapacityDeferred)
        kv.complete(epoch)
    with kv.begin_step([other], 16) as step:
        step.commit()


def test_16_an_offloaded_page_goes_to_no_new_row() -> None:
    kv = manager(4)
    row = kv.create(1)
    run(kv, row, 32)
    pins = kv.pin(row[0])
    kv.release(row)
    other = kv.create(1)
    with kv.begin_step(other, 32) as step:
        assert not set(step.plan().block_table[0].tolist()) & set(pins.pages.tolist())
        step.commit()
    assert isinstance(kv.begin_step(other, 16), CapacityDeferred)


def test_17_a_step_without_rows_stores_nothing_and_shows_nothing() -> None:
    kv = manager(8)
    buffers = IndexPlanBuffers(4, 64, 8)
    rows = kv.create(3)
    with kv.begin_step(rows, 20) as step:
        step.plan(buffers)
        step.commit()
    with kv.begin_step([], []) as step:
        plan = step.plan(buffers)
        step.commit()
    assert (plan.num_seqs, plan.num_tokens) == (0, 0)
    assert (buffers.slot_mapping == -1).all()
    assert (buffers.block_table == -1).all()


def test_18_minus_one_appears_only_as_padding() -> None:
    kv = manager(8)
    rows = kv.create(2)
    with kv.begin_step(rows, [33, 5]) as step:
        plan = step.plan()
        step.commit()
    assert (plan.slot_mapping >= 16).all()
    assert plan.block_table.tolist() == [[1, 2, 3], [4, -1, -1]]


@pytest.mark.parametrize("policy", list(PadPolicy))
def test_19_the_null_page_is_never_stored_to(policy: PadPolicy) -> None:
    kv = manager(12)
    buffers = IndexPlanBuffers(8, 64, 8, policy=policy)
    rng = np.random.default_rng(0)
    rows = kv.create(4)
    for size in rng.integers(0, 5, 30):
        step = kv.begin_step(rows[:size], rng.integers(0, 3, size))
        if isinstance(step, CapacityDeferred):
            break
        with step:
            plan = step.plan(buffers)
            step.commit()
        stored = buffers.slot_mapping[buffers.slot_mapping != -1]
        assert (stored >= 16).all()
        assert (plan.block_table[plan.context_lens > 0][:, 0] > 0).all()


def test_20_a_padded_row_has_length_zero_and_reads_the_null_page_if_anything() -> None:
    kv = manager(8)
    buffers = IndexPlanBuffers(4, 64, 8, policy=PadPolicy.NULL_PAGE)
    with kv.begin_step(kv.create(1), 3) as step:
        step.plan(buffers)
        step.commit()
    assert buffers.block_table[1:, 0].tolist() == [0, 0, 0]
    assert buffers.context_lens[1:].tolist() == [0, 0, 0]
    flat = KVCacheManager(PageGeometry(8, 16, null_page=False), max_sequences=2)
    with flat.begin_step(flat.create(1), 3) as step, pytest.raises(InvalidGeometry):
        step.plan(buffers)


def test_21_shrinking_from_112_rows_to_100_leaves_nothing_behind() -> None:
    kv = manager(200, rows=112, columns=2)
    buffers = IndexPlanBuffers(112, 112, 2)
    rows = kv.create(112)
    for size in (112, 100):
        with kv.begin_step(rows[:size], 1) as step:
            step.plan(buffers)
            step.commit()
    assert (buffers.block_table[100:] == -1).all()
    assert not buffers.context_lens[100:].any()
    assert not buffers.past_seqlens[100:].any()
    assert (buffers.slot_mapping[100:] == -1).all()
    assert (buffers.cumulative_sequence_length[100:] == 100).all()


def test_22_sizes_8_3_8_1_equal_fresh_plans() -> None:
    kv = manager(100, rows=8)
    buffers = IndexPlanBuffers(8, 64, 16)
    rows = kv.create(8)
    rng = np.random.default_rng(1)
    for size in (8, 3, 8, 1):
        batch = rng.permutation(rows)[:size]
        with kv.begin_step(batch, rng.integers(1, 9, size)) as step:
            plan, fresh = step.plan(buffers), step.plan()
            step.commit()
        width = fresh.block_table.shape[1]
        assert np.array_equal(plan.block_table[:, :width], fresh.block_table)
        assert (plan.block_table[:, width:] == -1).all()
        assert np.array_equal(plan.slot_mapping, fresh.slot_mapping)
        assert np.array_equal(plan.past_seqlens, fresh.past_seqlens)


def test_23_context_129_does_not_fit_eight_columns_of_16() -> None:
    kv = manager(20)
    buffers = IndexPlanBuffers(2, 256, 8)
    rows = kv.create(1)
    with kv.begin_step(rows, 129) as step:
        before = buffers.block_table.copy()
        with pytest.raises(PagedTableTooNarrow) as refusal:
            step.plan(buffers)
        assert refusal.value.numbers == {"needed": 9, "columns": 8}
        assert np.array_equal(buffers.block_table, before)
        step.commit()
    with pytest.raises(PagedTableTooNarrow):
        PagedIndexPlan.build(kv.view(), [PagedRequest(int(rows[0]), 1, 129)], max_blocks=8)


def test_24_slots_stay_in_int32_and_element_offsets_leave_it() -> None:
    from paged_kv import LatentCacheGeometry

    assert PageGeometry(2**27 - 1, 16).num_slots == 2**31 - 16
    with pytest.raises(PagedSlotOverflow):
        PageGeometry(2**27, 16)
    big = LatentCacheGeometry(65_536, 64, 576, v_head_size=512, rotary_dim=64, rotary_offset=512)
    assert big.needs_64_bit_offsets
    assert big.latent_element_offset(65_535, 63, 575) == 65_536 * 64 * 576 - 1


def test_25_a_resumed_row_shows_its_new_pages_only() -> None:
    kv = manager(8)
    buffers = IndexPlanBuffers(2, 64, 8)
    row, other = kv.create(2)
    with kv.begin_step([row], 40) as step:
        old = step.plan(buffers).block_table.copy()
        step.commit()
    kv.complete(step.epoch)
    [left] = kv.preempt(row)
    run(kv, [other], 16)
    [again] = kv.resume(left, 64)
    assert again != row
    with kv.begin_step([again], 40) as step:
        plan, fresh = step.plan(buffers), step.plan()
        step.commit()
    assert np.array_equal(plan.block_table[:, :3], fresh.block_table)
    assert plan.block_table[0, :3].tolist() != old[0, :3].tolist()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_26_a_full_hit_leaves_a_token_to_compute(blocks: int) -> None:
    kv = manager(8)
    chain = cached(kv, range(16 * blocks))
    with kv.lookup_and_pin(chain) as hit:
        assert hit.num_tokens == 16 * (blocks - 1)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_27_a_preempted_row_comes_back_with_its_hit(length: int) -> None:
    kv = manager(8)
    cache = HistoryCache(9, 16)
    tokens = list(range(length))
    row = kv.create(1)
    with kv.begin_step(row, length) as step:
        cache.write(step.plan(), [tokens])
        step.commit()
    kv.complete(step.epoch)
    chain = chain_of(tokens)
    kv.register(row[0], chain)
    [left] = kv.preempt(row)
    hit = kv.lookup_and_pin(chain)
    assert hit.num_tokens == (length - 1) // 16 * 16
    again = kv.resume(left, length + 8, hit)
    with kv.begin_step(again, length - hit.num_tokens) as step:
        plan = step.plan()
        cache.write(plan, [tokens])
        assert cache.mismatch(plan, [tokens], [0]) is None
        step.commit()
    kv.check("full")


def test_28_the_digest_map_never_exceeds_the_pages() -> None:
    kv = manager(16, rows=4)
    rng = np.random.default_rng(5)
    for _ in range(400):
        cached(kv, rng.integers(0, 9, int(rng.integers(16, 60))))
        assert kv.stats().cached_digests <= 16
    kv.check("full")


def test_29_an_evicted_page_is_not_found() -> None:
    kv = manager(3)
    chain = cached(kv, range(49 - 1))
    row = kv.create(1)
    run(kv, row, 48)
    chain.extend([1])
    with kv.lookup_and_pin(chain) as hit:
        assert hit.num_tokens == 0


def test_30_nothing_is_found_after_a_reset() -> None:
    kv = manager(8)
    chains = [cached(kv, range(start, start + 33)) for start in (0, 100, 200)]
    kv.reset_prefix_cache()
    for chain in chains:
        with kv.lookup_and_pin(chain) as hit:
            assert hit.num_tokens == 0
    assert kv.stats().num_pages_clean == 8
    kv.check("full")


def test_31_colliding_digests_cost_a_hit_and_never_give_a_wrong_page() -> None:
    def constant(data: bytes) -> bytes:
        return b"same"

    with pytest.raises(UnverifiedHash):
        manager(4).lookup_and_pin(chain_of(range(33), hash_function=constant))
    kv = manager(8, verify_tokens=True)
    row = kv.create(1)
    run(kv, row, 48)
    kv.register(row[0], chain_of([5] * 48, hash_function=constant))
    assert kv.stats().cached_digests == 1
    with kv.lookup_and_pin(chain_of([6] * 33, hash_function=constant)) as hit:
        assert hit.num_tokens == 0
    with kv.lookup_and_pin(chain_of([5] * 33, hash_function=constant)) as hit:
        assert hit.pages.tolist() == [1]
    kv.check("full")


@pytest.mark.parametrize(
    "other",
    [
        CacheKey(model="m2", dtype="float16", layout="LATENT"),
        CacheKey(model="m", dtype="bfloat16", layout="LATENT"),
        CacheKey(model="m", dtype="float16", layout="SEPARATE"),
        CacheKey(model="m", dtype="float16", layout="LATENT", layers="0-7"),
        CacheKey(model="m", dtype="float16", layout="LATENT", adapter="lora-1"),
        CacheKey(model="m", dtype="float16", layout="LATENT", multimodal=("image-1",)),
        CacheKey(model="m", dtype="float16", layout="LATENT", tenant="acme"),
    ],
)
def test_32_the_same_tokens_under_another_key_do_not_hit(other: CacheKey) -> None:
    kv = manager(8)
    cached(kv, range(33))
    with kv.lookup_and_pin(chain_of(range(33), other)) as hit:
        assert hit.num_tokens == 0


def test_32_the_order_of_images_counts() -> None:
    one = CacheKey(model="m", dtype="float16", layout="LATENT", multimodal=("a", "b"))
    two = CacheKey(model="m", dtype="float16", layout="LATENT", multimodal=("b", "a"))
    assert one.root(16) != two.root(16)


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_33_digests_do_not_depend_on_the_process(seed: str) -> None:
    program = (
        "from paged_kv import CacheKey, PrefixChain\n"
        "chain = PrefixChain(CacheKey(model='m', dtype='float16', layout='LATENT'), 16)\n"
        "chain.extend(range(32))\n"
        "print(*[digest.hex() for digest in chain.digests])\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == [digest.hex() for digest in chain_of(range(32)).digests]


def test_34_a_chain_loses_its_leaf_first() -> None:
    kv = manager(3)
    chain = cached(kv, range(48))
    pages = kv._state.prefix.find(chain, 3).tolist()
    row = kv.create(1)
    with kv.begin_step(row, 1) as step:
        assert step.plan().block_table[0, 0] == pages[2]
        step.commit()
    chain.extend([1])
    with kv.lookup_and_pin(chain) as hit:
        assert hit.pages.tolist() == pages[:2]


def test_35_hashing_by_another_block_size_is_refused() -> None:
    with pytest.raises(InvalidGeometry):
        manager(4).lookup_and_pin(chain_of(range(64), size=32))


def test_36_the_granularity_of_caching_is_reported() -> None:
    assert manager(4, block_size=64).stats().cacheable_tokens == 64


def test_37_content_of_another_model_is_not_restored() -> None:
    """A swapped row comes back as itself only: its host pages belong to the handle, not to a digest."""
    kv = manager(4, host_blocks=4)
    row, other = kv.create(2)
    run(kv, [row], 32)
    out = kv.swap_out(row)
    kv.confirm_swap(out)
    with pytest.raises(ValueError, match="not swapped out"):
        kv.swap_in(other)
    kv.release(row)
    with pytest.raises(StaleSequenceHandle):
        kv.swap_in(row)
    assert kv.stats().num_host_pages_free == 4


def test_38_removed_is_told_before_the_page_is_used_again() -> None:
    kv = manager(1)
    told = []
    kv.add_event_sink(lambda event: told.append((event.kind, event.page)))
    cached(kv, range(16))
    with kv.begin_step(kv.create(1), 1) as step:
        assert told == [("stored", 1), ("removed", 1)]
        assert step.plan().block_table[0, 0] == 1
        step.commit()


@pytest.mark.parametrize("accepted", list(itertools.product(range(4), repeat=3)))
def test_39_rows_accept_different_counts(accepted: tuple[int, ...]) -> None:
    kv = manager(12)
    rows = kv.create(3)
    starts = [14, 15, 16]
    run(kv, rows, starts)
    with kv.begin_step(rows, 3) as step:
        step.plan()
        step.commit_prefix(accepted)
    lengths = [start + count for start, count in zip(starts, accepted, strict=True)]
    assert kv.view().seq_len[:3].tolist() == lengths
    assert kv.view().n_blocks[:3].tolist() == [-(-length // 16) for length in lengths]
    kv.complete(step.epoch)
    kv.check("full")


def test_40_one_beam_of_a_group_cannot_be_swapped() -> None:
    kv = manager(8, host_blocks=8)
    row = kv.create(1)
    run(kv, row, 40)
    beams = kv.fork(row[0], 3)
    before = kv.digest()
    with pytest.raises(SharedPageNotSwappable):
        kv.swap_out(beams[:1])
    with pytest.raises(SharedPageNotSwappable):
        kv.swap_out([*row, *beams])
    assert kv.digest() == before


def test_41_two_rows_of_60_percent_preempt_each_other_a_bounded_number_of_times() -> None:
    kv = manager(10, max_preemptions=2)
    total, preemptions, finished = 6 * 16, 0, 0
    waiting = [(None, 0), (None, 0)]
    running: list[tuple[int, int]] = []
    for _ in range(2_000):
        if waiting:
            left, _ = waiting[0]
            got = kv.admit(total, promise_lens=16) if left is None else kv.resume(left, total)
            if not isinstance(got, CapacityDeferred):
                waiting.pop(0)
                running.append((int(got[0]), 0))
        for handle, length in list(running):
            if (handle, length) not in running:
                continue
            step = kv.begin_step([handle], 8)
            if isinstance(step, CapacityDeferred):
                victim = running.pop()
                [left] = kv.preempt(victim[0])
                waiting.append((left, 0))
                preemptions += 1
                break
            step.commit()
            kv.complete(step.epoch)
            running[running.index((handle, length))] = (handle, length + 8)
            if length + 8 == total:
                kv.release(handle)
                running.remove((handle, total))
                finished += 1
    assert finished == 2
    assert 1 <= preemptions <= 6


def test_42_the_null_page_is_not_counted_as_room() -> None:
    length = 45
    kv = KVCacheManager(PageGeometry(3 + 1, 16), max_sequences=2)
    assert not isinstance(kv.admit(length), (CapacityDeferred, UnserviceableRequest))
    assert KVCacheManager(PageGeometry(3, 16), max_sequences=2).admit(length) == UnserviceableRequest(3, 2)


def test_43_a_promise_evicts_nothing() -> None:
    kv = manager(8)
    chain = cached(kv, range(64))
    kv.admit(5 * 16)
    assert kv.stats().prefix_evictions_total == 0
    chain.extend([1])
    with kv.lookup_and_pin(chain) as hit:
        assert hit.num_tokens == 64


def test_49_buffer_addresses_stay() -> None:
    kv = manager(80, columns=80)
    buffers = IndexPlanBuffers(4, 64, 80)
    row = kv.create(1)
    names = ("block_table", "slot_mapping", "cumulative_sequence_length", "past_seqlens", "context_lens")
    first = None
    for _ in range(1_000):
        with kv.begin_step(row, 1) as step:
            plan = step.plan(buffers)
            step.commit()
        kv.complete(step.epoch)
        addresses = [getattr(plan, name).ctypes.data for name in names]
        first = first or addresses
        assert addresses == first


def test_50_a_page_that_was_just_hit_is_not_room() -> None:
    kv = manager(4)
    chain = cached(kv, range(48))
    chain.extend(range(30))
    hit = kv.lookup_and_pin(chain)
    assert len(hit.pages) == 3
    assert kv.admit(5 * 16, hits=[hit]) == UnserviceableRequest(5, 4)
    kv2 = manager(5)
    chain = cached(kv2, range(48))
    other = kv2.create(1)
    run(kv2, other, 16)
    chain.extend(range(30))
    hit = kv2.lookup_and_pin(chain)
    assert kv2.admit(5 * 16, hits=[hit]) == CapacityDeferred(needed=2, available=1, after_fence=1)
    assert hit.is_open


def test_51_removed_is_told_with_the_last_copy() -> None:
    kv = manager(2)
    told = []
    kv.add_event_sink(lambda event: told.append(event.kind))
    rows = kv.create(2)
    run(kv, rows, 16)
    for row in rows:
        kv.register(row, chain_of(range(16)))
    assert told == ["stored"]
    kv.release(rows[:1])
    run(kv, kv.create(1), 16)
    assert told == ["stored"]
    with kv.lookup_and_pin(chain_of(range(17))) as hit:
        assert hit.pages.tolist() == [2]
    kv.release(rows[1:])
    run(kv, kv.create(1), 16)
    assert told == ["stored", "removed"]


def test_52_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    kv = manager(50, columns=64)
    assert kv.admit(57 * 16) == UnserviceableRequest(needed=57, usable=50)
    assert kv.begin_step(kv.create(1), 57 * 16) == UnserviceableRequest(needed=57, usable=50)
    assert kv.stats().preemptions_total == 0


def test_17b_a_quarantined_page_is_never_offered() -> None:
    kv = manager(3)
    kv.quarantine(2)
    with pytest.raises(PageNotOwned):
        kv.quarantine(2)
    with kv.begin_step(kv.create(1), 32) as step:
        assert step.plan().block_table[0].tolist() == [1, 3]
        step.commit()
    assert kv.stats().num_pages_quarantined == 1
    kv.check("full")


def test_histories_differ_when_tokens_do() -> None:
    assert history_of([1, 2, 3])[:2] == history_of([1, 2])
    assert history_of([1, 2])[1] != history_of([2, 2])[1]
