"""What the same machine reaches in the same run by the plainest program for it: read, copy, multiply, launch.

Each kernel's result is checked before its time counts: a read by the exclusive or of the words, a copy by a
digest, a product against NumPy. Rates are medians, of the best of a few launch shapes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from paged_cuda import DeviceArray

from paged_bench.errors import MeasurementError
from paged_bench.measure.bench import Bench, Launch, part_of
from paged_bench.measure.kernels import MMA, PRODUCT_ROUNDS
from paged_bench.measure.timing import Timer
from paged_bench.record import Ceiling, Samples

_LARGEST = 4 << 30
_BEYOND_L2 = 4  # times its size; less would be read from it again
_SMALL = 1 << 20  # of which the host reads every word
_SHAPES = ((1, 1024), (2, 1024), (4, 512), (8, 256))  # blocks a multiprocessor, threads
_CALLS = 4
_ROUNDS = 2048
_PRODUCT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Ceilings:
    """All ceilings of a run.

    Attributes:
        all: For the record.
        read_shape: Blocks a multiprocessor and threads that read fastest.
    """

    all: tuple[Ceiling, ...]
    read_shape: tuple[int, int]

    def value(self, what: str) -> float:
        """Return the first of a kind."""
        return next(one.value for one in self.all if one.what == what)


def measure_ceilings(
    bench: Bench, dtypes: Iterable[str], *, show: Callable[[str], None] = lambda text: None
) -> Ceilings:
    """Measure all ceilings; `dtypes` are the element types to multiply.

    Raises:
        MeasurementError: A kernel's result is wrong, or the free memory is too little to read beyond the L2.
        DriverError: The GPU is out of memory.
    """
    free = bench.free()
    nbytes = min(_LARGEST, free // 4) // 4096 * 4096
    if nbytes < max(4096, _BEYOND_L2 * bench.counters.facts(bench.device.ordinal).l2_bytes):
        problem = f"has {free / 1e6:.1f} MB free, of which a quarter does not pass its L2"
        raise MeasurementError("GPU", problem, "end what else is on it")
    memory = DeviceArray.empty((nbytes // 2,), "bfloat16", bench.device)
    bench.fill(memory, 1)
    show("read")
    read, shape = _read(bench, memory)
    show("copy")
    found = [read, _copy(bench, memory)]
    del memory
    for dtype in dtypes:
        show(f"matmul {dtype}")
        found.append(_matmul(bench, dtype))
    return Ceilings((*found, _launch(bench)), shape)


def _ceiling(what: str, amount: float, series: Samples, method: str, dtype: str | None = None) -> Ceiling:
    rates = tuple(amount / value * 1e6 for value in series.values)
    value = statistics.median(rates)
    # The names are literals in the record, which pydantic checks here.
    return Ceiling(what=what, value=value, dtype=dtype, method=method, samples=rates)  # type: ignore[arg-type]


def check_read(bench: Bench, memory: DeviceArray) -> None:
    """Compare the read kernel's result with the host's over the first megabyte.

    Raises:
        MeasurementError: They differ.
    """
    sample = part_of(memory, 0, min(_SMALL, memory.nbytes) // 4, "int32")
    bench.read_result()
    bench.launch(bench.reading(sample.pointer, sample.nbytes, blocks=7, threads=256))
    wanted = int(np.bitwise_xor.reduce(sample.to_numpy(bench.stream).view(np.uint32)))
    got = bench.read_result()
    if got != wanted:
        raise MeasurementError(
            "read", f"its words give {got:#x}, the host's {wanted:#x}", "its time means nothing"
        )


def _best(bench: Bench, what: str, make: Callable[[int, int], Launch]) -> tuple[Samples, tuple[int, int]]:
    """Time a launch in each shape and return the fastest series and its shape."""
    timer, processors = Timer(bench), bench.device.properties.multiprocessors
    found = [
        (timer.graph(what, [make(blocks * processors, threads)] * _CALLS), (blocks, threads))
        for blocks, threads in _SHAPES
    ]
    return min(found, key=lambda one: one[0].median)


def _words(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]} threads a multiprocessor, graph replay"


def _read(bench: Bench, memory: DeviceArray) -> tuple[Ceiling, tuple[int, int]]:
    check_read(bench, memory)

    def make(blocks: int, threads: int) -> Launch:
        return bench.reading(memory.pointer, memory.nbytes, blocks=blocks, threads=threads)

    series, shape = _best(bench, "read", make)
    method = f"own kernel, 16-byte loads of {memory.nbytes / 1e9:.2f} GB, {_words(shape)}"
    return _ceiling("read", memory.nbytes, series, method), shape


def _copy(bench: Bench, memory: DeviceArray) -> Ceiling:
    half = memory.nbytes // 2
    kernels = bench.kernels(memory.dtype)
    parts = [part_of(memory, offset, half // 2, memory.dtype) for offset in (0, half)]

    def make(blocks: int, threads: int) -> Launch:
        return kernels.copy(parts[1].pointer, parts[0].pointer, half, blocks=blocks, threads=threads)

    bench.poison(parts[1])
    bench.launch(make(7, 256))
    if bench.digest(parts[0]) != bench.digest(parts[1]):
        raise MeasurementError("copy", "the copy differs from its source", "its time means nothing")
    series, shape = _best(bench, "copy", make)
    method = f"own kernel, {half / 1e9:.2f} GB read and written, {_words(shape)}"
    return _ceiling("copy", 2 * half, series, method)


def _matmul(bench: Bench, dtype: str) -> Ceiling:
    kernels, multiprocessors = bench.kernels(dtype), bench.device.properties.multiprocessors
    shape = kernels.product_shape
    blocks = multiprocessors * (2 if shape is MMA else 1)
    a, b = (DeviceArray.empty((256, 64), dtype, bench.device) for _ in range(2))
    out = DeviceArray.empty((blocks * 2 * 64 * 256,), "float32", bench.device)
    for seed, array in enumerate((a, b)):
        bench.fill(array, seed + 3)
    bench.poison(out)
    bench.launch(kernels.product(a.pointer, b.pointer, out.pointer, PRODUCT_ROUNDS, blocks))
    _check_product(bench, dtype, a, b, out, blocks, tiled=shape is MMA)
    launch = kernels.product(a.pointer, b.pointer, out.pointer, _ROUNDS, blocks)
    series = Timer(bench).graph("matmul", [launch] * _CALLS)
    method = f"own kernel, {shape.method}, {blocks} blocks, random data, graph replay"
    return _ceiling("matmul", float(shape.operations * _ROUNDS * blocks), series, method, dtype)


def _check_product(
    bench: Bench, dtype: str, a: DeviceArray, b: DeviceArray, out: DeviceArray, blocks: int, *, tiled: bool
) -> None:
    left, right = (_double(array.to_numpy(bench.stream), dtype) for array in (a, b))
    if tiled:
        once = (
            left.reshape(-1)[: 4 * 256].reshape(4, 16, 16).sum(0)
            @ right.reshape(-1)[: 64 * 16].reshape(64, 16).T
        )
    else:
        once = left[:128] @ right.T
    wanted = PRODUCT_ROUNDS * once
    got = out.to_numpy(bench.stream).reshape(-1)[: blocks * 8 * once.size if tiled else blocks * once.size]
    got = got.reshape(-1, *once.shape)
    error = max(float(np.linalg.norm(one - wanted) / np.linalg.norm(wanted)) for one in (got[0], got[-1]))
    if not error <= _PRODUCT_TOLERANCE:
        raise MeasurementError(
            "matmul", f"relative error {error:.2g} against NumPy", "its rate means nothing"
        )


def _double(values: NDArray[np.generic], dtype: str) -> NDArray[np.float64]:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    return values.view(kind).astype(np.float64)


def _launch(bench: Bench) -> Ceiling:
    spin = bench.kernels("bfloat16").spin(0)
    series = Timer(bench).graph("launch", [spin] * 64)
    return Ceiling(
        what="launch",
        value=series.median,
        method="own kernel of one thread that does nothing, 64 in a row or more, graph replay",
        samples=series.values,
    )


def cycles_per_us(bench: Bench) -> float:
    """Return the clock cycles that the spinning kernel takes in a microsecond."""
    cycles, kernels, timer = 200_000, bench.kernels("bfloat16"), Timer(bench)
    long, short = (timer.graph("launch", [kernels.spin(count)] * 4).median for count in (cycles, 0))
    return cycles / max(long - short, 1e-3)
