# ruff: noqa: D102 - the methods are those of the protocols
"""A GPU without a GPU: launches take effect in NumPy at once and take simulated time.

It knows the measurement's own kernels and the operator's baseline and split paths, by the oracle. What a run
does around them (order, checks, counting, records, interrupts) is the real code. Times are what a test says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from paged_cuda._driver import Dim, Launcher
from paged_cuda.params import AttentionParams
from paged_cuda.testing import FAKE_GPU, FakeDriver, Launched
from paged_oracle import paged_attention
from paged_schema import PagedAttentionAttributes

from paged_bench.measure.counters import Counters, GpuFacts
from paged_bench.measure.kernels import MMA, WGMMA, Products, Span
from paged_bench.measure.machine import Machine
from paged_bench.measure.nvml import GpuState

# Microseconds of a launch by the beginning of its symbol; what counts bytes or cycles is not among them.
TIMES: Mapping[str, float] = {
    "append": 2.0,
    "schedule": 3.0,
    "baseline": 40.0,
    "sm80": 40.0,
    "combine": 2.0,
}
READ_RATE, COPY_RATE, PRODUCT_RATE, CYCLES_PER_US = 4e12, 3.5e12, 7e14, 1980.0
LAUNCH_US = 1.0
_DRAWN = 65_521  # numbers that larger memory repeats; odd, so that they do not cancel out
_ATTENTION = ("baseline", "combine")
_BF16 = np.dtype(ml_dtypes.bfloat16)
Spoil = Callable[[NDArray[np.generic]], None]


def _at(pointer: int, count: int, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(pointer)
    view: NDArray[np.generic] = np.ctypeslib.as_array(memory).view(dtype)
    return view


def _matrix(pointer: int, rows: int, columns: int) -> NDArray[np.float64]:
    return _at(pointer, rows * columns, _BF16).reshape(rows, columns).astype(np.float64)


def _output(params: bytes) -> int:
    return int(AttentionParams.from_buffer_copy(params).output)


class SimulatedGpu(FakeDriver):
    """A driver that carries out what is launched.

    Attributes:
        clock_us: Simulated time.
        noise: Relative deviation of every launch's time.
        slower: Factor on the time of attention.
        spoil: Changes each output after it was computed.
        before_launch: Called before each launch takes effect; may raise.
    """

    def __init__(
        self,
        *,
        limit: int = 96 << 20,
        memory_rate: float = READ_RATE,
        capability: tuple[int, int] = FAKE_GPU.capability,
    ) -> None:
        super().__init__(replace(FAKE_GPU, capability=capability), limit=limit)
        self.clock_us = 0.0
        self.noise = 0.002
        self.slower = 1.0
        self.spoil: Spoil | None = None
        self.before_launch: Callable[[str], None] | None = None
        self.memory_rate = memory_rate
        self._draw = np.random.default_rng(1)
        # Results that stand as they were computed: the same launch again need not compute them again.
        self._fresh: dict[tuple[str, bytes], int] = {}

    def fill(self, pointer: int, byte: int, nbytes: int, stream: int) -> None:
        # What attention left elsewhere stands.
        self._fresh = {
            (name, params): value
            for (name, params), value in self._fresh.items()
            if name in _ATTENTION and not pointer <= _output(params) < pointer + nbytes
        }
        super().fill(pointer, byte, nbytes, stream)

    def copy_to_device(self, pointer: int, address: int, nbytes: int, stream: int) -> None:
        self._fresh.clear()
        super().copy_to_device(pointer, address, nbytes, stream)

    def launcher(
        self,
        function: int,
        grid: Dim,
        block: Dim,
        shared_bytes: int,
        arguments: tuple[ctypes.Structure, ...],
        *,
        programmatic: bool = False,
    ) -> Launcher:
        record = super().launcher(function, grid, block, shared_bytes, arguments, programmatic=programmatic)

        def launch(stream: int) -> None:
            record(stream)
            if stream not in self.capturing:
                self._carry_out(self.launched.pop())

        return launch

    def launch_graph(self, executable: int, stream: int) -> None:
        self._enter("launch_graph")
        for one in self.executables[executable]:
            self._carry_out(one)

    def _carry_out(self, launched: Launched) -> None:
        if self.before_launch is not None:
            self.before_launch(launched.symbol)
        self.clock_us += self._time(launched) * (1 + self.noise * self._draw.standard_normal())
        name = launched.symbol.partition("_")[0]
        effect = getattr(self, f"_run_{name}", None)
        if effect is not None and (name, launched.params) not in self._fresh:
            effect(launched)
        if name == "read":
            span = Span.from_buffer_copy(launched.params)
            _at(span.sum, 1, np.dtype(np.uint32))[0] ^= self._fresh[name, launched.params]

    def _time(self, launched: Launched) -> float:
        symbol = launched.symbol
        if symbol in ("fill", "read", "copy", "digest"):
            nbytes = Span.from_buffer_copy(launched.params).words * 16
            rate = COPY_RATE / 2 if symbol == "copy" else self.memory_rate
            return float(nbytes / rate * 1e6)
        if symbol == "spin":
            return LAUNCH_US + float(Span.from_buffer_copy(launched.params).words) / CYCLES_PER_US
        if symbol == "matmul":
            shape = WGMMA if self.properties(0).capability == (9, 0) else MMA
            rounds = Products.from_buffer_copy(launched.params).rounds
            return float(rounds * shape.operations * launched.grid[0] / PRODUCT_RATE * 1e6)
        time = next((time for name, time in TIMES.items() if symbol.startswith(name)), LAUNCH_US)
        return time * (self.slower if time >= TIMES["baseline"] else 1.0)

    def _run_fill(self, launched: Launched) -> None:
        self._fresh.clear()
        span = Span.from_buffer_copy(launched.params)
        draw = np.random.default_rng(span.seed)
        values = draw.standard_normal(min(span.words * 8, _DRAWN)).astype(_BF16)
        target = _at(span.out, span.words * 8, _BF16)
        target[:] = np.resize(values, target.shape)

    def _run_read(self, launched: Launched) -> None:
        span = Span.from_buffer_copy(launched.params)
        words = _at(span.source, span.words * 4, np.dtype(np.uint32))
        self._fresh["read", launched.params] = int(np.bitwise_xor.reduce(words))

    def _run_copy(self, launched: Launched) -> None:
        span = Span.from_buffer_copy(launched.params)
        ctypes.memmove(span.out, span.source, span.words * 16)
        self._fresh["copy", launched.params] = 0

    def _run_digest(self, launched: Launched) -> None:
        span = Span.from_buffer_copy(launched.params)
        words = _at(span.source, span.words * 8, np.dtype(np.uint16)).astype(np.uint64)
        result = _at(span.sum, 2, np.dtype(np.uint64))
        with np.errstate(over="ignore"):
            places = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            result[0] += ((words + np.uint64(1)) * places).sum()
        result[1] += np.uint64(((words & np.uint64(0x7F80)) == 0x7F80).sum())

    def _run_matmul(self, launched: Launched) -> None:
        products = Products.from_buffer_copy(launched.params)
        if self.properties(0).capability == (9, 0):
            a, b = _matrix(products.a, 128, 64), _matrix(products.b, 256, 64)
            blocks = launched.grid[0]
        else:
            a, b = _matrix(products.a, 64, 16).reshape(4, 16, 16).sum(0), _matrix(products.b, 64, 16)
            blocks = 8 * launched.grid[0]  # one a warp
        out = _at(products.out, blocks * len(a) * len(b), np.dtype(np.float32)).reshape(blocks, len(a), -1)
        out[:] = products.rounds * (a @ b.T)
        self._fresh["matmul", launched.params] = 0

    def _run_baseline(self, launched: Launched) -> None:
        attend(AttentionParams.from_buffer_copy(launched.params), self.spoil)
        self._fresh["baseline", launched.params] = 0

    def _run_combine(self, launched: Launched) -> None:
        # Of a split path the last kernel does all of it.
        attend(AttentionParams.from_buffer_copy(launched.params), self.spoil)
        self._fresh["combine", launched.params] = 0


def attend(params: AttentionParams, spoil: Spoil | None = None) -> None:
    """Carry out one step over the memory that `params` points to, bfloat16 and dense, by the oracle."""
    int32 = np.dtype(np.int32)
    block = 1 << params.block_shift
    width, heads = params.head_size, params.num_heads
    attributes = PagedAttentionAttributes(
        num_heads=heads,
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=params.v_head_size,
        scale=params.scale,
        do_rotary=int(params.rotary_dim > 0),
        rotary_offset=params.rotary_offset if params.rotary_dim else 0,
    )
    inputs = {
        "query": _at(params.query, params.tokens * heads * width, _BF16).reshape(params.tokens, -1),
        "key": _at(params.key, params.tokens * width, _BF16).reshape(params.tokens, -1),
        "key_cache": _at(params.key_cache, params.num_blocks * block * width, _BF16).reshape(
            params.num_blocks, block, 1, width
        ),
        "cumulative_sequence_length": _at(params.cumulative_sequence_length, params.batch + 1, int32),
        "past_seqlens": _at(params.past_seqlens, params.batch, int32),
        "block_table": _at(params.block_table, params.batch * params.max_blocks, int32).reshape(
            params.batch, params.max_blocks
        ),
        "slot_mapping": _at(params.slot_mapping, params.tokens, int32),
    }
    if params.rotary_dim:
        half = params.rotary_dim // 2
        for name in ("cos_cache", "sin_cache"):
            table = _at(getattr(params, name), params.rotary_rows * half, _BF16)
            inputs[name] = table.reshape(params.rotary_rows, half)
    result = paged_attention(attributes, inputs).output
    output = _at(params.output, result.size, _BF16).reshape(result.shape)
    output[:] = result
    if spoil is not None:
        spoil(output)


class SimulatedCounters:
    """Events and memory of a simulated GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._times: dict[int, float] = {}

    def create_event(self) -> int:
        event = len(self._times) + 1
        self._times[event] = 0.0
        return event

    def destroy_event(self, event: int) -> None:
        pass

    def record_event(self, event: int, stream: int) -> None:
        self._times[event] = self._gpu.clock_us

    def elapsed_us(self, begin: int, end: int) -> float:
        return self._times[end] - self._times[begin]

    def memory(self) -> tuple[int, int]:
        used = sum(map(len, self._gpu.memory.values()))
        return self._gpu.limit - used, self._gpu.limit

    def facts(self, ordinal: int) -> GpuFacts:
        return GpuFacts("00" * 16, 1 << 20, self._gpu.limit)


_counters: type[Counters] = SimulatedCounters
IDLE = GpuState(utilization=0, processes=frozenset(), mig=False, sm_clock_mhz=1980.0)


def simulated_machine(gpu: SimulatedGpu, look: Callable[[str], GpuState] = lambda uuid: IDLE) -> Machine:
    """Return a machine with this GPU."""
    return Machine(lambda: gpu, lambda: SimulatedCounters(gpu), look, lambda seconds: None)
