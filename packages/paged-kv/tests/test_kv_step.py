"""The step transaction: what it reserves, shows, commits and takes back."""

import numpy as np
import pytest
from paged_kv import CapacityDeferred, IndexPlanBuffers, KVCacheManager, PageGeometry, UnserviceableRequest
from paged_kv.errors import (
    AcceptedOutOfRange,
    PagedDuplicateRequest,
    StaleSequenceHandle,
    StepClosed,
    StepOpen,
)


def manager(blocks: int = 9, rows: int = 4, columns: int = 8) -> KVCacheManager:
    return KVCacheManager(PageGeometry(blocks, 16), max_sequences=rows, max_blocks_per_sequence=columns)


def run(kv: KVCacheManager, rows: np.ndarray, lengths: list[int]) -> int:
    with kv.begin_step(rows, lengths) as step:
        step.plan()
        step.commit()
    return step.epoch


def test_the_five_tensors_of_a_mixed_batch() -> None:
    kv = manager()
    rows = kv.create(2)
    run(kv, rows, [20, 0])
    with kv.begin_step(rows[::-1], [3, 1]) as step:
        plan = step.plan()
        step.commit()
    assert plan.block_table.tolist() == [[3, -1], [1, 2]]
    assert plan.slot_mapping.tolist() == [48, 49, 50, 2 * 16 + 4]
    assert plan.cumulative_sequence_length.tolist() == [0, 3, 4]
    assert plan.past_seqlens.tolist() == [0, 20]
    assert plan.context_lens.tolist() == [3, 21]
    assert plan.attention_metadata.tolist() == [3, 21, 3]
    for array in (plan.block_table, plan.slot_mapping, plan.cumulative_sequence_length, plan.past_seqlens):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert not array.flags.writeable


def test_leaving_the_block_without_a_commit_rolls_back() -> None:
    kv = manager()
    rows = kv.create(1)
    with kv.begin_step(rows, 40):
        assert kv.stats().num_pages_in_use == 3
    assert kv.stats().num_pages_in_use == 0
    assert kv.stats().num_pages_free == 8
    assert kv.view().seq_len[0] == 0


def test_a_batch_that_does_not_fit_is_a_value_and_changes_nothing() -> None:
    kv = manager(blocks=5)
    rows = kv.create(2)
    run(kv, rows[:1], [33])
    assert kv.begin_step(rows[1:], 17) == CapacityDeferred(needed=2, available=1, after_fence=1)
    assert kv.begin_step(rows[1:], 65) == UnserviceableRequest(needed=5, usable=4)
    assert kv.stats().num_pages_free == 1


def test_accepting_a_prefix_gives_back_the_pages_above() -> None:
    kv = manager()
    rows = kv.create(1)
    epoch = run(kv, rows, [14])
    kv.complete(epoch)
    with kv.begin_step(rows, 20) as step:
        step.plan()
        with pytest.raises(AcceptedOutOfRange):
            step.commit_prefix(21)
        step.commit_prefix(2)
    assert kv.view().seq_len[0] == 16
    assert kv.stats().num_pages_in_use == 1
    assert kv.stats().num_pages_fenced == 2
    kv.complete(step.epoch)
    assert kv.stats().num_pages_free == 7


def test_a_finished_step_cannot_be_used_again() -> None:
    kv = manager()
    rows = kv.create(1)
    step = kv.begin_step(rows, 1)
    with pytest.raises(StepOpen):
        kv.begin_step(rows, 1)
    step.commit()
    for call in (step.plan, step.commit, step.rollback, lambda: step.commit_prefix(0)):
        with pytest.raises(StepClosed):
            call()


def test_a_row_twice_in_a_batch_and_a_released_row_are_refused() -> None:
    kv = manager()
    rows = kv.create(2)
    with pytest.raises(PagedDuplicateRequest):
        kv.begin_step([rows[0], rows[0]], 1)
    kv.release(rows[:1])
    with pytest.raises(StaleSequenceHandle):
        kv.begin_step(rows, 1)
    with pytest.raises(StaleSequenceHandle):
        kv.release(rows[:1])


def test_buffers_show_what_a_fresh_plan_shows_after_every_shrink() -> None:
    kv = manager(blocks=60, rows=8)
    buffers = IndexPlanBuffers(8, 64, 8)
    rows = kv.create(8)
    for size in (8, 3, 8, 1, 5):
        with kv.begin_step(rows[:size], np.arange(1, size + 1)) as step:
            plan, fresh = step.plan(buffers), step.plan()
            step.commit()
        widest = fresh.block_table.shape[1]
        assert np.array_equal(plan.block_table[:, :widest], fresh.block_table)
        assert (buffers.block_table[size:] == -1).all()
        assert (plan.block_table[:, widest:] == -1).all()
        assert np.array_equal(plan.slot_mapping, fresh.slot_mapping)
        assert (buffers.slot_mapping[plan.num_tokens :] == -1).all()
        assert (buffers.cumulative_sequence_length[size:] == plan.num_tokens).all()
        assert not buffers.context_lens[size:].any()
