"""Continuous batching over random arrivals, lengths and pools: nothing is lost, reordered or left behind."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_bench.demo.pool import pages_for, pool_geometry
from paged_bench.demo.requests import Request
from paged_bench.demo.scheduler import Limits, Scheduler
from paged_bench.demo.usage import RunTotals
from paged_bench.errors import PromptError
from paged_kv import KVCacheManager

BLOCK = 16


class CountingModel:
    """A model whose next token depends on the whole sequence, kept by page slot as a real cache would be.

    It writes each token into the slot that the plan gives it, and reads a sequence back through its block
    table: a token that is lost, reordered or overwritten changes everything that follows.
    """

    def __init__(self, geometry):
        self.block_size = geometry.block_size
        self.slots = np.full(geometry.num_blocks * geometry.block_size, -1, np.int64)

    def __call__(self, plan, token_ids, rows):
        assert len(token_ids) == plan.num_tokens
        assert len(set(plan.slot_mapping.tolist())) == plan.num_tokens
        self.slots[plan.slot_mapping] = token_ids
        ends = plan.cumulative_sequence_length[1:]
        chosen = []
        for row in rows:
            sequence = int(np.searchsorted(ends, row, side="right"))
            assert row == ends[sequence] - 1
            chosen.append(self.next_token(self.read(plan, sequence)))
        return np.array(chosen, np.int64)

    def read(self, plan, sequence):
        positions = np.arange(plan.context_lens[sequence])
        pages = plan.block_table[sequence, positions // self.block_size]
        return self.slots[pages * self.block_size + positions % self.block_size].tolist()

    @staticmethod
    def next_token(tokens):
        return hash(tuple(tokens)) % 50


def expected_ids(request, stop_ids):
    tokens, new = list(request.prompt_ids), []
    while len(new) < request.max_new:
        new.append(CountingModel.next_token(tokens + new))
        if new[-1] in stop_ids:
            break
    return new


def serve(requests, geometry, limits, stop_ids=frozenset()):
    columns = max(pages_for(request, geometry.block_size) for request in requests)
    kv = KVCacheManager(geometry, max_sequences=limits.sequences, max_blocks_per_sequence=columns)
    scheduler = Scheduler(kv, requests, limits, stop_ids)
    records = list(scheduler.steps(CountingModel(geometry)))
    return scheduler, records, kv


@st.composite
def workloads(draw):
    count = draw(st.integers(1, 12))
    requests = [
        Request(
            index,
            "",
            tuple(draw(st.lists(st.integers(0, 49), min_size=1, max_size=60))),
            draw(st.integers(1, 25)),
            draw(st.integers(0, 30)),
        )
        for index in range(count)
    ]
    longest = max(pages_for(request, BLOCK) for request in requests)
    pages = longest + draw(st.integers(0, 12))
    sequences = draw(st.integers(1, 6))
    limits = Limits(sequences, sequences + draw(st.integers(0, 40)))
    return requests, pages, limits, frozenset(draw(st.sets(st.integers(0, 49), max_size=4)))


@settings(deadline=None, max_examples=60)
@given(workloads())
def test_every_request_ends_with_its_own_tokens(workload):
    requests, pages, limits, stop_ids = workload
    geometry = pool_geometry(requests, BLOCK, pages, context=10_000)
    scheduler, records, kv = serve(requests, geometry, limits, stop_ids)

    assert [sequence.request for sequence in scheduler.sequences] == requests
    for sequence in scheduler.sequences:
        assert sequence.finished
        assert sequence.new_ids == expected_ids(sequence.request, stop_ids)

    for record in records:
        held = Counter(page for owned in record.pages.values() for page in owned)
        assert all(owners == 1 for owners in held.values())
        assert 0 not in held, "the null page was handed out"
        assert len(held) <= pages
        assert 0 < record.running <= limits.sequences
        assert record.running <= record.prefill_tokens + record.decode_tokens <= limits.tokens

    stats = kv.stats()
    assert stats.num_pages_in_use == 0
    assert stats.num_pages_free == pages
    assert stats.num_sequences == 0


@settings(deadline=None, max_examples=40)
@given(workloads())
def test_first_to_arrive_is_first_served(workload):
    requests, pages, limits, _ = workload
    _, records, _ = serve(requests, pool_geometry(requests, BLOCK, pages, context=10_000), limits)
    first_seen = {}
    for record in records:
        for index in record.pages:
            first_seen.setdefault(index, record.step)
    order = sorted(requests, key=lambda request: request.arrival)
    starts = [first_seen[request.index] for request in order]
    assert starts == sorted(starts)
    assert all(first_seen[request.index] >= request.arrival for request in requests)


@settings(deadline=None, max_examples=40)
@given(workloads())
def test_totals_add_up(workload):
    requests, pages, limits, stop_ids = workload
    scheduler, records, kv = serve(
        requests, pool_geometry(requests, BLOCK, pages, context=10_000), limits, stop_ids
    )
    totals = RunTotals()
    for record in records:
        totals.add(record)
    assert totals.decode_tokens == sum(len(sequence.new_ids) for sequence in scheduler.sequences)
    assert totals.prefill_tokens == sum(len(request.prompt_ids) - 1 for request in requests)
    assert totals.handouts == kv.stats().allocations_total
    assert totals.reused == totals.handouts - totals.distinct_pages
    assert totals.peak_pages <= pages


def test_admission_waits_for_pages_and_pages_are_used_again():
    requests = [Request(index, "", tuple(range(20)), 10, index) for index in range(8)]
    scheduler, records, _ = serve(requests, pool_geometry(requests, BLOCK, 4, context=100), Limits(8, 72))
    totals = RunTotals()
    for record in records:
        totals.add(record)
    assert totals.deferred_steps > 0
    assert totals.reused > 0
    assert totals.peak_running == 2
    assert all(len(sequence.new_ids) == 10 for sequence in scheduler.sequences)


def test_a_long_prefill_shares_its_steps_with_decodes():
    requests = [Request(0, "", (1, 2), 20, 0), Request(1, "", tuple(range(40)), 3, 2)]
    _, records, _ = serve(requests, pool_geometry(requests, BLOCK, 6, context=100), Limits(2, 12))
    assert sum(record.mixed for record in records) >= 3


def test_a_failing_model_leaves_the_sequences_as_they_were():
    requests = [Request(0, "", (1, 2, 3), 5, 0)]
    geometry = pool_geometry(requests, BLOCK, None, context=100)
    kv = KVCacheManager(geometry, max_sequences=1, max_blocks_per_sequence=1)
    scheduler = Scheduler(kv, requests, Limits(1, 8))

    def fail(plan, token_ids, rows):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        next(scheduler.steps(fail))
    assert scheduler.sequences[0].cached == 0
    assert scheduler.sequences[0].new_ids == []
    # The plan had been handed out, so its pages stay fenced until the step is known to be over.
    kv.complete(1)
    list(scheduler.steps(CountingModel(geometry)))
    assert scheduler.sequences[0].new_ids == expected_ids(requests[0], frozenset())


@given(prompt=st.integers(1, 300), new=st.integers(1, 100), block=st.sampled_from([16, 32, 64, 128]))
def test_a_request_beyond_the_pool_is_refused_with_its_need(prompt, new, block):
    request = Request(0, "", (1,) * prompt, new)
    need = pages_for(request, block)
    assert pool_geometry([request], block, need, context=1000).usable_blocks == need
    if need > 1:
        with pytest.raises(PromptError, match=f"--pages {need}"):
            pool_geometry([request], block, need - 1, context=1000)


def test_a_request_beyond_the_context_is_refused():
    with pytest.raises(PromptError, match="context is 64"):
        pool_geometry([Request(0, "", (1,) * 60, 5)], 16, None, context=64)


@pytest.mark.parametrize(("count", "pages"), [(1, 2), (7, 14), (8, 11), (20, 28)])
def test_only_many_prompts_get_a_pool_that_is_too_small_for_all(count, pages):
    requests = [Request(index, "", (1,) * 20, 10) for index in range(count)]
    assert pool_geometry(requests, BLOCK, None, context=100).usable_blocks == pages
