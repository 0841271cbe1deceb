"""One cache grown across granules under one graph: what is committed and moved, and if the bits agree."""

from __future__ import annotations

import numpy as np

from paged_bench.residency.cache import GrowingCache
from paged_bench.residency.machine import Machine
from paged_bench.residency.probe import Outputs, Probe
from paged_bench.residency.results import CrossingResult
from paged_bench.residency.shapes import KvShape, Variant

STAGES = (100, 4_000, 16_000)
_MIN_BUCKET = 128
_STEPS = 3  # one warms, one captures, one replays


def crossing(
    machine: Machine, shape: KvShape, stages: tuple[int, ...] = STAGES
) -> tuple[CrossingResult, ...]:
    """Grow a sequence-major cache in place to each length, and run steps there.

    Raises:
        BackendError: The memory is refused.
    """
    cache, driver = machine.cache(Variant(False, True, True, _MIN_BUCKET), shape)
    probe = machine.probe(cache, shape)
    taken, past = 0, 0
    results = []
    for tokens in stages:
        # Asked around the growth alone: graphs and arrays take memory of their own.
        free, copied = driver.memory_info()[0], cache.counters().actual_copy_bytes
        cache.ensure(tokens)
        taken += free - driver.memory_info()[0]
        if probe is not None:
            probe.fill(past, tokens - 1)
        past = tokens - 1
        equal = _steps(cache, probe, past)
        counters = cache.counters()
        results.append(
            CrossingResult(
                tokens=tokens,
                granules_a_binding=cache.storage.physical_bytes // machine.granularity // (2 * shape.layers),
                planned_bytes=cache.planned_bytes,
                driver_bytes=taken,
                bytes_moved=counters.actual_copy_bytes - copied,
                captures=counters.captures,
                replays=counters.replays,
                growth_keeps=counters.growth_keeps,
                equal_bits=equal,
            )
        )
    if probe is not None:
        probe.close()
    cache.close()
    return tuple(results)


def _steps(cache: GrowingCache, probe: Probe | None, past: int) -> bool | None:
    """Run the steps of one length; whether the last one's bits are those of a fresh allocation."""
    outputs: Outputs = []
    for _ in range(_STEPS):
        with cache.step(prefill=False) as access:
            outputs = probe.run(access, past) if probe is not None else []
    return None if probe is None else all(map(np.array_equal, outputs, probe.fresh(past)))
