"""Inputs of a case: random, ragged where the case is, and more of them than the L2 holds.

Invariant: sets share the pages that a step only reads, each in an order of its own, and never a page that a
step writes. So what one set computes does not depend on when the others ran.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from paged_cuda import DeviceArray

from paged_bench.measure.bench import Bench
from paged_bench.measure.suite import CaseSpec

ROTATED_BYTES = 300_000_000  # five times the L2 of an H200
_DISTINCT_BYTES = 1_300_000_000  # of read-only pages; larger sets share them
_MOST_SETS = 64
_SEED = 2026
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class HostPlan:
    """The index tensors of one set.

    Attributes:
        block_table: (batch, columns), -1 behind the last page of a sequence.
        slot_mapping: (tokens,).
        cumulative: (batch + 1,).
        past: (batch,).
    """

    block_table: Int32
    slot_mapping: Int32
    cumulative: Int32
    past: Int32


@dataclass(frozen=True)
class InputSet:
    """The arrays of one call and what their index tensors hold."""

    plan: HostPlan
    arrays: dict[str, DeviceArray]

    @property
    def output(self) -> DeviceArray:
        """Where the step writes."""
        return self.arrays["output"]


@dataclass(frozen=True)
class Footprint:
    """Device memory of a case, bytes.

    Attributes:
        sets: Input sets.
        cache: All pages.
        inputs: Queries, keys, index tensors and rotary tables of all sets.
        outputs: Outputs of all sets.
    """

    sets: int
    cache: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, spec: CaseSpec) -> Footprint:
        """Count what `spec` takes."""
        query = 2 * spec.tokens * spec.heads * spec.head_size
        output = 2 * spec.tokens * spec.heads * spec.v_head_size
        a_step = spec.work.bytes // spec.layers + query + output
        sets = spec.layers if spec.layers > 1 else max(2, min(_MOST_SETS, math.ceil(ROTATED_BYTES / a_step)))
        columns = -(-max(spec.context_lens) // spec.block_size)
        index = 4 * (spec.batch * (columns + 2) + 1 + spec.tokens)
        tables = 2 * max(spec.context_lens) * spec.rotary_dim
        key = 2 * spec.tokens * spec.head_size
        shared, own = spec.pages()
        pages = sets * (shared + own) if spec.layers > 1 else _shared_pages(spec, sets) + sets * own
        return cls(sets, pages * spec.page_bytes, sets * (query + key + index) + tables, sets * output)

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.cache + self.inputs + self.outputs


def _shared_pages(spec: CaseSpec, sets: int) -> int:
    """Return the read-only pages of all sets: each has its own while they fit the distinct bytes."""
    shared, _ = spec.pages()
    return min(sets * shared, max(shared, _DISTINCT_BYTES // spec.page_bytes))


class Pool:
    """Device memory for pages; any case is a view of it, filled with the same normal numbers each time."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._memory: DeviceArray | None = None

    @property
    def nbytes(self) -> int:
        """What it holds now."""
        return 0 if self._memory is None else self._memory.nbytes

    def view(self, spec: CaseSpec, nbytes: int) -> DeviceArray:
        """Return the cache of `spec`, (pages, block_size, 1, head_size), as no case has written to it yet.

        Raises:
            DriverError: The GPU is out of memory.
        """
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None  # let go before more is asked for
            self._memory = DeviceArray.empty((nbytes,), "uint8", self._bench.device)
        memory = self._memory
        shape = (nbytes // spec.page_bytes, spec.block_size, 1, spec.head_size)
        strides = (spec.block_size * spec.head_size, spec.head_size, spec.head_size, 1)
        view = DeviceArray(memory.pointer, shape, strides, spec.dtype, memory.ordinal, memory.owner)
        self._bench.fill(view, _SEED)
        return view

    def drop(self) -> None:
        """Give the memory back."""
        self._memory = None


def host_plans(spec: CaseSpec, sets: int) -> list[HostPlan]:
    """Return the index tensors of `sets` calls over one pool of pages; random, and the same every time."""
    draw = np.random.default_rng(_SEED)
    shared, own = spec.pages()
    region = _shared_pages(spec, sets)
    order: NDArray[np.int64] = np.empty(0, np.int64)
    plans = []
    for index in range(sets):
        if len(order) < shared:
            order = draw.permutation(region)
        taken, order = order[:shared], order[shared:]
        written = region + index * own + draw.permutation(own)
        plans.append(_plan(spec, taken, written))
    return plans


def layer_plan(spec: CaseSpec) -> HostPlan:
    """Return the index tensors of one step of a stack: every layer has a cache of its own and one table."""
    shared, own = spec.pages()
    order = np.random.default_rng(_SEED).permutation(shared + own)
    return _plan(spec, order[:shared], order[shared:])


def _plan(spec: CaseSpec, taken: NDArray[np.int64], written: NDArray[np.int64]) -> HostPlan:
    columns = -(-max(spec.context_lens) // spec.block_size)
    table = np.full((spec.batch, columns), -1, np.int32)
    slots = np.empty(spec.tokens, np.int32)
    reads = writes = token = 0
    for row, (context, query) in enumerate(zip(spec.context_lens, spec.query_lens, strict=True)):
        past, pages = context - query, -(-context // spec.block_size)
        old = past // spec.block_size
        table[row, :old] = taken[reads : reads + old]
        table[row, old:pages] = written[writes : writes + pages - old]
        reads, writes = reads + old, writes + pages - old
        positions = np.arange(past, context)
        slots[token : token + query] = (
            table[row, positions // spec.block_size] * spec.block_size + positions % spec.block_size
        )
        token += query
    past_lens = np.subtract(spec.context_lens, spec.query_lens).astype(np.int32)
    return HostPlan(table, slots, np.cumsum([0, *spec.query_lens]).astype(np.int32), past_lens)


def rotary_tables(spec: CaseSpec) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Return cosine and sine, (longest context, rotary_dim / 2) in the element type, base 10,000."""
    frequencies = 10_000.0 ** (-np.arange(0, spec.rotary_dim, 2) / spec.rotary_dim)
    angles = np.arange(max(spec.context_lens))[:, None] * frequencies
    dtype = np.dtype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else np.float16)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


class InputMaker:
    """Makes the sets of one case on the GPU.

    Args:
        bench: The instruments.
        spec: The case.
    """

    def __init__(self, bench: Bench, spec: CaseSpec) -> None:
        self._bench = bench
        self._spec = spec
        self._tables: dict[str, DeviceArray] = {}
        if spec.rotary_dim:
            names = ("cos_cache", "sin_cache")
            self._tables = {
                name: self._upload(table) for name, table in zip(names, rotary_tables(spec), strict=True)
            }

    def _upload(self, array: NDArray[np.generic]) -> DeviceArray:
        return DeviceArray.from_numpy(array, self._bench.stream, self._bench.device)

    def _normal(self, shape: tuple[int, ...], seed: int) -> DeviceArray:
        array = DeviceArray.empty(shape, self._spec.dtype, self._bench.device)
        self._bench.fill(array, seed)
        return array

    def make(self, index: int, plan: HostPlan, cache: DeviceArray) -> InputSet:
        """Return set `index` over `cache`, its output poisoned.

        Raises:
            DriverError: The GPU is out of memory.
        """
        spec, device = self._spec, self._bench.device
        output = DeviceArray.empty((spec.tokens, spec.heads * spec.v_head_size), spec.dtype, device)
        self._bench.poison(output)
        arrays = {
            "query": self._normal((spec.tokens, spec.heads * spec.head_size), _SEED + 2 * index + 1),
            "key": self._normal((spec.tokens, spec.head_size), _SEED + 2 * index + 2),
            "key_cache": cache,
            "cumulative_sequence_length": self._upload(plan.cumulative),
            "past_seqlens": self._upload(plan.past),
            "block_table": self._upload(plan.block_table),
            "slot_mapping": self._upload(plan.slot_mapping),
            "output": output,
            **self._tables,
        }
        return InputSet(plan, arrays)
