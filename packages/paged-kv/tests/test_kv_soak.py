"""Many requests through one manager: nothing is lost, nothing grows.

100,000 by default; PAGED_SOAK_REQUESTS asks for another number, such as 1000000.
"""

import os
import sys

import numpy as np
import pytest
from paged_kv import (
    CacheKey,
    CapacityDeferred,
    IndexPlanBuffers,
    KVCacheManager,
    PageGeometry,
    PrefixChain,
    StepTransaction,
)

REQUESTS = int(os.environ.get("PAGED_SOAK_REQUESTS", "100000"))
ROWS, USABLE, SIZE, CHECK_EVERY = 256, 1_200, 16, 1_000
KEY = CacheKey(model="soak", dtype="float16", layout="LATENT")


def prompts() -> list[PrefixChain]:
    """A few hundred prompts with common fronts, so that some hit and some evict."""
    rng = np.random.default_rng(1)
    fronts = [rng.integers(0, 1_000, int(rng.integers(16, 80))) for _ in range(8)]
    chains = []
    for _ in range(400):
        chain = PrefixChain(KEY, SIZE)
        chain.extend(fronts[int(rng.integers(8))])
        chain.extend(rng.integers(0, 1_000, int(rng.integers(1, 60))))
        chains.append(chain)
    return chains


@pytest.mark.timeout(3_600 if REQUESTS > 100_000 else 240)
def test_a_hundred_thousand_requests_lose_nothing() -> None:
    kv = KVCacheManager(
        PageGeometry(USABLE + 1, SIZE), max_sequences=ROWS, max_blocks_per_sequence=16, watermark=8
    )
    buffers = IndexPlanBuffers(ROWS, 65_536, 16)
    rng, chains = np.random.default_rng(0), prompts()
    handles, left = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    queries = np.empty(0, dtype=np.int64)
    in_flight: list[int] = []
    arrived = finished = next_check = 0
    blocks_after_warm_up = 0
    while finished < REQUESTS:
        prefilled: list[tuple[int, PrefixChain]] = []
        while arrived < REQUESTS and len(handles) < ROWS:
            chain, output = chains[int(rng.integers(len(chains)))], int(rng.integers(1, 8))
            hit = kv.lookup_and_pin(chain)
            got = kv.admit(chain.num_tokens + output, hits=[hit])
            if isinstance(got, CapacityDeferred):
                hit.drop()
                break
            assert isinstance(got, np.ndarray)
            handles = np.append(handles, got)
            left = np.append(left, output)
            queries = np.append(queries, chain.num_tokens - hit.num_tokens)
            prefilled.append((int(got[0]), chain))
            arrived += 1
        step = kv.begin_step(handles, queries)
        if isinstance(step, CapacityDeferred):
            kv.complete(in_flight[-1])
            in_flight.clear()
            step = kv.begin_step(handles, queries)
        assert isinstance(step, StepTransaction)
        step.plan(buffers)
        step.commit()
        in_flight.append(step.epoch)
        for handle, chain in prefilled:
            kv.register(handle, chain)
        if len(in_flight) > 2:
            kv.complete(in_flight.pop(0))
        left -= 1
        queries = np.ones(len(handles), dtype=np.int64)
        done = left <= 0
        if done.any():
            kv.release(handles[done])
            finished += int(done.sum())
            handles, left, queries = handles[~done], left[~done], queries[~done]
        if finished >= next_check:
            kv.check("full")
            next_check += CHECK_EVERY
            assert kv.stats().cached_digests <= USABLE
            if finished >= REQUESTS // 5 and not blocks_after_warm_up:
                blocks_after_warm_up = sys.getallocatedblocks()
    kv.complete(in_flight[-1])
    kv.check("full")
    stats = kv.stats()
    assert stats.num_pages_free == USABLE
    assert stats.num_sequences == stats.num_pages_promised == stats.num_pages_fenced == 0
    assert stats.prefix_hits_total > REQUESTS // 4
    assert stats.prefix_evictions_total > REQUESTS // 10
    assert stats.releases_total == stats.admissions_total == REQUESTS
    assert sys.getallocatedblocks() - blocks_after_warm_up < 20_000
