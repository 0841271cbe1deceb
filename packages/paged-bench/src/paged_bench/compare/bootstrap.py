"""The ratio of two medians with an interval, and the noise of a run, from the samples alone.

Invariant: the same samples and the same seed give the same numbers on every machine.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from paged_bench.record import Samples

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

RESAMPLES = 2000
LEVEL = 0.95
HALVABLE = 10  # values of one block from which on its halves serve as two


@dataclass(frozen=True)
class Ratio:
    """Median of the head over median of the base, with a percentile bootstrap interval.

    Attributes:
        value: above 1 is slower.
        low: lower end of the 95 % interval.
        high: upper end.
    """

    value: float
    low: float
    high: float


def ratio_of_medians(base: Sequence[float], head: Sequence[float], key: str) -> Ratio:
    """Compare two sets of samples; `key` seeds the resampling.

    Example:
        >>> ratio_of_medians([10.0] * 9, [12.0] * 9, "a case")
        Ratio(value=1.2, low=1.2, high=1.2)
    """
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    ratios = bootstrap_medians(head, rng) / bootstrap_medians(base, rng)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(statistics.median(head) / statistics.median(base), float(low), float(high))


def bootstrap_medians(values: Sequence[float], rng: np.random.Generator) -> Floats:
    """Return medians of `RESAMPLES` resamples without drawing the resamples.

    A resample of n values is n uniform draws mapped through the sorted values, so its k-th smallest is the
    value under the k-th order statistic of n uniforms, which is Beta(k, n - k + 1). The next one up, for the
    second middle value of an even n, is the least of the n - k draws above it.
    """
    ordered, n = np.sort(np.asarray(values, dtype=np.float64)), len(values)
    k = (n + 1) // 2
    lower = rng.beta(k, n - k + 1, RESAMPLES)
    if n % 2:
        return _under(ordered, lower)
    upper = lower + (1 - lower) * rng.beta(1, n - k, RESAMPLES)
    return (_under(ordered, lower) + _under(ordered, upper)) / 2


def _under(ordered: Floats, uniform: Floats) -> Floats:
    index = np.minimum((uniform * len(ordered)).astype(np.int64), len(ordered) - 1)
    return ordered[index]


def noise_of(samples: Samples) -> float | None:
    """Return how far apart medians of the same code lie within one run: an A/A comparison.

    Blocks were taken at different moments. A single block of at least `HALVABLE` values is cut in half, which
    sees less. None where there is nothing to compare.

    Example:
        >>> round(noise_of(Samples(what="call", timing="wall", values=(10.0, 11.0), blocks=(1, 1))), 3)
        0.1
    """
    blocks = samples.in_blocks()
    if len(blocks) == 1 and len(blocks[0]) >= HALVABLE:
        half = len(blocks[0]) // 2
        blocks = (blocks[0][:half], blocks[0][half:])
    if len(blocks) < 2:
        return None
    medians = [statistics.median(block) for block in blocks]
    return max(medians) / min(medians) - 1


def without_rounds(base: Samples, head: Samples) -> tuple[Samples, Samples]:
    """Return both sides of an interleaved run with the level of each round taken out.

    Block i of both sides was taken in round i. What the machine did to that round, it did to both, so each
    round is brought to the level of all: the geometric mean of its two block medians becomes that of every
    round. The ratio within a round stays as it was.

    Example:
        >>> slow_second_round = Samples(what="call", timing="wall", values=(10.0, 20.0), blocks=(1, 1))
        >>> same, _ = without_rounds(slow_second_round, slow_second_round)
        >>> [round(value, 3) for value in same.values]
        [14.142, 14.142]
    """
    pairs = list(zip(base.in_blocks(), head.in_blocks(), strict=True))
    levels = [math.sqrt(statistics.median(before) * statistics.median(after)) for before, after in pairs]
    common = math.exp(statistics.fmean(map(math.log, levels)))
    sides = []
    for side, samples in enumerate((base, head)):
        rounds = zip(pairs, levels, strict=True)
        values = tuple(value * common / level for pair, level in rounds for value in pair[side])
        sides.append(samples.model_copy(update={"values": values}))
    return sides[0], sides[1]
