"""What the page authority costs on one core, and what a step costs as contexts and pools grow.

1,024 sequences of about 32,768 tokens, pages of 16. Every round times one operation; what it needs is set up
outside the clock. The calibration case is a fixed piece of NumPy work: it says how fast the machine was.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from paged_kv import (
    CacheKey,
    IndexPlanBuffers,
    KVCacheManager,
    PageGeometry,
    PrefixChain,
    PrefixHit,
    StepTransaction,
)
from pytest_benchmark.fixture import BenchmarkFixture

ROWS, CONTEXT, SIZE = 1_024, 32_768, 16
Int64Array = npt.NDArray[np.int64]
Filled = tuple[KVCacheManager, Int64Array]


def begin(kv: KVCacheManager, rows: Int64Array, lengths: Int64Array) -> StepTransaction:
    """A step that is known to fit."""
    step = kv.begin_step(rows, lengths)
    assert isinstance(step, StepTransaction), step
    return step


def run(kv: KVCacheManager, rows: Int64Array, lengths: Int64Array) -> None:
    """One whole step."""
    step = begin(kv, rows, lengths)
    step.commit()
    kv.complete(step.epoch)


def filled(rows: int, context: int, *, spare: int = 64, extra_pages: int = 0) -> Filled:
    """A manager with `rows` sequences of about `context` tokens, which cross pages at different steps."""
    columns = (context + spare) // SIZE + 32
    geometry = PageGeometry(rows * (context // SIZE + spare // SIZE + 4) + 1 + extra_pages, SIZE)
    kv = KVCacheManager(geometry, max_sequences=rows + 8, max_blocks_per_sequence=columns)
    handles, rng = kv.create(rows), np.random.default_rng(0)
    lengths = context - rng.integers(0, SIZE, rows)
    for start in range(0, rows, 128):
        run(kv, handles[start : start + 128], lengths[start : start + 128])
    return kv, rng.permutation(handles)


@pytest.fixture(scope="module")
def many() -> Filled:
    """The large manager that several benchmarks share; each leaves its lengths about as it found them."""
    return filled(ROWS, CONTEXT)


def measure(
    benchmark: BenchmarkFixture,
    title: str,
    operation: Callable[..., object],
    *,
    rounds: int,
    setup: Callable[[], object] | None = None,
    **about: float,
) -> None:
    """Time `operation` alone, in microseconds a round; `about` goes into the record."""
    benchmark.extra_info.update(title=title, **about)
    benchmark.pedantic(operation, setup=setup, rounds=rounds, warmup_rounds=2)


def measure_decode(
    benchmark: BenchmarkFixture, kept: Filled, title: str, rounds: int, **about: float
) -> None:
    """Reserve, validate, plan into buffers, commit: one token a row, permuted batch order."""
    kv, rows = kept
    buffers = IndexPlanBuffers(len(rows), len(rows), kv.view().cells.shape[1])
    ones, turns, done = np.ones(len(rows), dtype=np.int64), itertools.count(1), list[StepTransaction]()

    def step() -> None:
        transaction = begin(kv, rows, ones)
        transaction.plan(buffers)
        transaction.commit()
        done.append(transaction)

    def settle() -> None:
        while done:
            kv.complete(done.pop().epoch)
        if next(turns) % 64 == 0:  # back to where the rows began, with one step that the buffers settle by
            kv.truncate(rows, kv.view().seq_len[rows & 0xFFFFFF] - 63)
            step()
            settle()

    measure(benchmark, title, step, rounds=rounds, setup=settle, **about)
    settle()


def test_calibration(benchmark: BenchmarkFixture) -> None:
    table = np.arange(1 << 20, dtype=np.int64)
    index = np.random.default_rng(0).integers(0, 1 << 20, 1_024)

    def work() -> None:
        for _ in range(20):
            table.take(index).sum()

    measure(benchmark, "a fixed piece of NumPy work", work, rounds=50)


def test_decode_step(benchmark: BenchmarkFixture, many: Filled) -> None:
    measure_decode(benchmark, many, "decode step", 200, aim_median_us=60.0, aim_p99_us=250.0)


def test_rebuild(benchmark: BenchmarkFixture, many: Filled) -> None:
    """Plan into buffers that show nothing yet."""
    kv, rows = many
    buffers = IndexPlanBuffers(len(rows), len(rows), kv.view().cells.shape[1])

    def forget() -> None:
        buffers._last_slots = None
        buffers._shown[:] = 0  # as if every row were new, without the cost of padding the memory again

    with begin(kv, rows, np.ones(len(rows), dtype=np.int64)) as step:
        measure(
            benchmark, "full table rebuild", lambda: step.plan(buffers), rounds=60, setup=forget,
            aim_median_us=350.0, aim_p99_us=1_000.0,
        )  # fmt: skip


def test_truncate(benchmark: BenchmarkFixture, many: Filled) -> None:
    """Take one page off each of 1,024 rows."""
    kv, rows = many
    sizes = np.full(len(rows), SIZE, dtype=np.int64)

    def grow() -> tuple[tuple[Int64Array, Int64Array], dict[str, object]]:
        run(kv, rows, sizes)
        return (rows, kv.view().seq_len[rows & 0xFFFFFF] - SIZE), {}

    measure(
        benchmark, "truncate 1,024 rows", kv.truncate, rounds=60, setup=grow, aim_median_us=150.0
    )  # fmt: skip


def test_prefill_plan(benchmark: BenchmarkFixture) -> None:
    """Plan 8,192 query tokens of eight rows into buffers."""
    kv, rows = filled(16, 4_096, spare=2_048)
    buffers = IndexPlanBuffers(8, 8_192, kv.view().cells.shape[1])
    open_steps = list[StepTransaction]()

    def leave() -> None:
        while open_steps:
            step = open_steps.pop()
            step.rollback()
            kv.complete(step.epoch)

    def enter() -> tuple[tuple[StepTransaction], dict[str, object]]:
        leave()
        open_steps.append(begin(kv, rows[:8], np.full(8, 1_024, dtype=np.int64)))
        return (open_steps[-1],), {}

    def plan(step: StepTransaction) -> None:
        step.plan(buffers)

    about = {"aim_median_us": 80.0, "aim_p99_us": 300.0}
    measure(benchmark, "8,192-token prefill plan", plan, rounds=150, setup=enter, **about)
    leave()


def test_release(benchmark: BenchmarkFixture) -> None:
    """Release one row of 1,024 pages."""
    kv = KVCacheManager(PageGeometry(4_096, SIZE), max_sequences=4, max_blocks_per_sequence=1_024)

    def make() -> tuple[tuple[Int64Array], dict[str, object]]:
        row = kv.create(1)
        run(kv, row, np.array([1_024 * SIZE]))
        return (row,), {}

    measure(
        benchmark, "release 1,024 pages", kv.release, rounds=100, setup=make, aim_median_us=100.0
    )  # fmt: skip


def test_fork(benchmark: BenchmarkFixture) -> None:
    """Fork one row of 924 pages."""
    kv = KVCacheManager(PageGeometry(4_096, SIZE), max_sequences=4, max_blocks_per_sequence=1_024)
    row, made = kv.create(1), list[Int64Array]()
    run(kv, row, np.array([924 * SIZE]))

    def drop() -> None:
        while made:
            kv.release(made.pop())

    measure(
        benchmark, "fork 924 pages", lambda: made.append(kv.fork(row[0])), rounds=200, setup=drop,
        aim_median_us=10.0,
    )  # fmt: skip


CACHE_KEY = CacheKey(model="bench", dtype="float16", layout="LATENT")
TOKENS = np.random.default_rng(0).integers(0, 50_000, CONTEXT + 1)


def test_hash(benchmark: BenchmarkFixture) -> None:
    """Hash the 32,768 tokens that name 2,048 pages."""

    def fresh() -> tuple[tuple[PrefixChain], dict[str, object]]:
        return (PrefixChain(CACHE_KEY, SIZE),), {}

    def extend(chain: PrefixChain) -> None:
        chain.extend(TOKENS)

    measure(
        benchmark, "hash 32,768 tokens", extend, rounds=60, setup=fresh, aim_median_us=1_300.0
    )  # fmt: skip


def test_lookup(benchmark: BenchmarkFixture) -> None:
    """Look up and pin 2,048 cached pages."""
    kv = KVCacheManager(PageGeometry(4_096, SIZE), max_sequences=4, max_blocks_per_sequence=2_100)
    row, chain = kv.create(1), PrefixChain(CACHE_KEY, SIZE)
    run(kv, row, np.array([CONTEXT]))
    chain.extend(TOKENS[:CONTEXT])
    kv.register(row[0], chain)
    kv.release(row)
    hits = list[PrefixHit]()

    def ask() -> tuple[tuple[PrefixChain], dict[str, object]]:
        while hits:
            hits.pop().drop()
        other = PrefixChain(CACHE_KEY, SIZE)
        other.extend(TOKENS)
        return (other,), {}

    def look(other: PrefixChain) -> None:
        hits.append(kv.lookup_and_pin(other))

    title = "lookup and pin 2,048 pages"
    measure(benchmark, title, look, rounds=60, setup=ask, aim_median_us=120.0)
    assert len(hits[-1].pages) == CONTEXT // SIZE
    ask()


@pytest.mark.parametrize(
    ("context", "extra"), [(512, 0), (2_048, 0), (8_192, 0), (32_768, 0), (512, 1 << 19), (512, 1 << 21)]
)
def test_growth(benchmark: BenchmarkFixture, context: int, extra: int) -> None:
    """A decode step of 256 rows: longer contexts, then larger pools."""
    kept = filled(256, context, extra_pages=extra)
    pool = kept[0].geometry.num_blocks
    title = f"decode step of 256 rows, context {context:,}, pool {pool:,}"
    measure_decode(benchmark, kept, title, 100, context=context, pool=pool)
    del kept
    gc.collect()
