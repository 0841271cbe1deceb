"""The ring with removal from the middle, and the corners that the walks do not reach."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kv import CacheKey, IndexPlanBuffers, KVCacheManager, PageGeometry, PrefixChain
from paged_kv.errors import AcceptedOutOfRange, InvalidLength, StorageAlreadyOwned, UnknownSequence
from paged_kv.index_queue import IndexQueue

KEY = CacheKey(model="m", dtype="float16", layout="LATENT")


@settings(deadline=None, max_examples=100)
@given(
    size=st.integers(1, 9), moves=st.lists(st.tuples(st.sampled_from("ptr"), st.integers(0, 9)), max_size=80)
)
def test_the_queue_is_a_list(size: int, moves: list[tuple[str, int]]) -> None:
    queue, plain = IndexQueue(size), deque[int]()
    for move, number in moves:
        if move == "p":
            outside = [value for value in range(size) if value not in plain][:number]
            queue.apply_push(np.array(outside, dtype=np.int64))
            plain.extend(outside)
        elif move == "t":
            count = min(number, len(plain))
            values, head = queue.peek(count)
            assert values.tolist() == list(plain)[:count]
            queue.apply_take(count, head)
            for _ in range(count):
                plain.popleft()
        elif plain:
            gone = list(plain)[number % len(plain) :: 2]
            queue.apply_remove(np.array(gone, dtype=np.int64))
            for value in gone:
                plain.remove(value)
        assert queue.entries().tolist() == list(plain)
        assert len(queue) == len(plain)


def test_the_ring_is_compacted_before_it_overflows() -> None:
    queue = IndexQueue(4)
    queue.apply_push(np.array([0, 1, 2, 3]))
    for value in (1, 2, 3, 1, 2, 3, 1, 2):
        queue.apply_remove(np.array([value]))
        queue.apply_push(np.array([value]))
    assert queue.entries().tolist() == [0, 3, 1, 2]


def test_pages_hit_and_dropped_for_ever_stay_in_order() -> None:
    kv = KVCacheManager(PageGeometry(5, 16), max_sequences=2)
    row = kv.create(1)
    with kv.begin_step(row, 64) as step:
        step.commit()
    kv.complete(step.epoch)
    chain = PrefixChain(KEY, 16)
    chain.extend(range(65))
    kv.register(row[0], chain)
    kv.release(row)
    for _ in range(40):
        with kv.lookup_and_pin(chain) as hit:
            assert hit.num_tokens == 64
    assert kv._state.pool.evictable.entries().tolist() == [4, 3, 2, 1]
    kv.check("full")


@pytest.mark.parametrize("fenced", [False, True])
def test_a_cached_page_can_be_quarantined(fenced: bool) -> None:
    kv = KVCacheManager(PageGeometry(5, 16), max_sequences=2)
    row = kv.create(1)
    with kv.begin_step(row, 16) as step:
        step.commit()
    chain = PrefixChain(KEY, 16)
    chain.extend(range(17))
    kv.register(row[0], chain)
    if not fenced:
        kv.complete(step.epoch)
    kv.release(row)
    kv.quarantine(1)
    kv.check("full")
    if fenced:
        kv.complete(step.epoch)
    assert kv.stats().cached_digests == 0
    assert kv.stats().num_pages_free == 3
    kv.check("full")


def test_rows_that_part_before_the_end_of_their_references() -> None:
    """Both pages have two references each, but not from the same rows."""
    kv = KVCacheManager(PageGeometry(20, 16), max_sequences=4)
    row = kv.create(1)[0]
    with kv.begin_step([row], 48) as step:
        step.commit()
    left = kv.fork(row, at=48)[0]
    other = kv.create(1)[0]
    with kv.begin_step([other], 48) as step:
        step.commit()
    right = kv.fork(other)[0]
    assert kv.common_prefix_blocks([row, left]) == 3
    assert kv.common_prefix_blocks([other, right]) == 3
    assert kv.common_prefix_blocks([row, right]) == 0
    assert kv.common_prefix_blocks([]) == 0


def test_odd_arguments_are_refused() -> None:
    kv = KVCacheManager(PageGeometry(5, 16), max_sequences=2, storage="mine")
    with pytest.raises(StorageAlreadyOwned, match="'mine'"):
        KVCacheManager(PageGeometry(5, 16), storage="mine")
    with pytest.raises(UnknownSequence):
        kv.fork("x")
    row = kv.create(1)[0]
    with pytest.raises(InvalidLength):
        kv.fork(row, at=-1)
    step = kv.begin_step([row], 3)
    for accepted in ([-1], [1, 1], ["x"]):
        with pytest.raises(AcceptedOutOfRange):
            step.commit_prefix(accepted)
    step.rollback()


def test_quota_follows_drafts_and_rollbacks() -> None:
    kv = KVCacheManager(PageGeometry(20, 16), max_sequences=2)
    kv.set_quota("acme", 4)
    row = kv.create(1, tenant="acme")
    with kv.begin_step(row, 64) as step:
        step.plan(IndexPlanBuffers(2, 64, 8))
        step.commit_prefix(10)
    kv.check("full")
    step = kv.begin_step(row, 50)
    step.rollback()
    kv.check("full")
    with kv.begin_step(row, 54) as step:
        step.commit()
    kv.check("full")


def test_a_rollback_before_the_plan_leaves_other_fences_in_place() -> None:
    kv = KVCacheManager(PageGeometry(8, 16), max_sequences=4)
    row, other, third = kv.create(3)
    with kv.begin_step([row, other], 16) as first:
        first.commit()
    step = kv.begin_step([third], 16)
    kv.release(row)
    step.rollback()
    assert kv.stats().num_pages_fenced == 2
    kv.check("full")
    kv.complete(first.epoch)
    assert kv.stats().num_pages_fenced == 0
    step = kv.begin_step([third], 16)
    kv.release(other)
    step.rollback()
    assert kv.stats().num_pages_free == 7
    kv.check("full")
