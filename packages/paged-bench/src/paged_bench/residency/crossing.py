"""Caches grown across granules: what is committed and moved, and what becomes of the graph and the bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paged_bench.residency.cache import GrowingCache
from paged_bench.residency.machine import Machine
from paged_bench.residency.probe import Outputs, Probe
from paged_bench.residency.reader import Rows
from paged_bench.residency.results import CrossingResult
from paged_bench.residency.shapes import KvShape, Variant

STAGES = (100, 4_000, 16_000)
_MIN_BUCKET = 128
_STEPS = 3  # one warms, one captures, one replays
VARIANTS = (
    Variant(False, True, True, _MIN_BUCKET),
    Variant(True, True, True, _MIN_BUCKET, fixed_stride=True),
    Variant(True, True, True, _MIN_BUCKET),
)


def crossing(
    machine: Machine, shape: KvShape, stages: tuple[int, ...] = STAGES
) -> tuple[CrossingResult, ...]:
    """Grow a cache in place to each length, in every layout, and run steps there.

    Raises:
        BackendError: The memory is refused.
    """
    probe = machine.probe(shape, stages[-1])
    results = [stage for variant in VARIANTS for stage in _grow(machine, shape, variant, probe, stages)]
    if probe is not None:
        probe.close()
    return tuple(results)


def _grow(
    machine: Machine, shape: KvShape, variant: Variant, probe: Probe | None, stages: tuple[int, ...]
) -> Iterator[CrossingResult]:
    cache, driver = machine.cache(variant, shape)
    taken, past = 0, 0
    for tokens in stages:
        # Asked around the growth alone: graphs and arrays take memory of their own.
        free, copied = driver.memory_info()[0], cache.counters().actual_copy_bytes
        cache.ensure(tokens)
        taken += free - driver.memory_info()[0]
        layers = [cache.rows(layer) for layer in range(shape.layers)]
        if probe is not None:
            probe.fill(layers, past, tokens - 1)
        past = tokens - 1
        equal = _steps(cache, layers, probe, past)
        counters = cache.counters()
        yield CrossingResult(
            label=variant.label,
            layout=str(variant.layout),
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
    cache.close()


def _steps(cache: GrowingCache, layers: Sequence[Rows], probe: Probe | None, past: int) -> bool | None:
    """Run the steps of one length; whether the last one's bits are those of a fresh allocation."""
    outputs: Outputs = []
    for _ in range(_STEPS):
        with cache.step(prefill=False) as access:
            outputs = probe.run(layers, access, past) if probe is not None else []
    return None if probe is None else all(map(np.array_equal, outputs, probe.fresh(past)))
