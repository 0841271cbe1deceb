"""The measurement's own kernels: fill, read, copy, digest, spin, and products on tensor cores.

They are compiled here by NVRTC, so that ceilings need no other library. Each is checked where it is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from paged_cuda import Device
from paged_cuda._nvrtc import compile_to_cubin
from paged_cuda.compiler import architecture_of
from paged_cuda.sources import kernel_source

ROOT = Path(__file__).parent / "kernels"
Launch = Callable[[int], None]
PRODUCT_ROUNDS = 4  # what a number of rounds must be a multiple of
_FILL_THREADS = 256


class Span(ctypes.Structure):
    """Arguments of the memory kernels; `words` counts 16 bytes, or clock cycles for `spin`."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("out", "source", "words", "seed", "sum"))


class Products(ctypes.Structure):
    """Arguments of the product kernels."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("a", "b", "out", "rounds"))


class ProductShape:
    """What a product kernel computes: D (rows, columns) += A (rows, depth) B (depth, columns), each round.

    Attributes:
        source: Its file.
        method: Its name for people.
        shared_bytes: Dynamic shared memory of a block.
        operations: Of a block in one round.
    """

    def __init__(self, source: str, method: str, shared_bytes: int, operations: int) -> None:
        self.source = source
        self.method = method
        self.shared_bytes = shared_bytes
        self.operations = operations


MMA = ProductShape("matmul_mma.cu", "mma.sync m16n8k16 from registers", 0, 8 * 4 * 2 * 16 * 64 * 16)
WGMMA = ProductShape(
    "matmul_wgmma.cu", "wgmma m64n256k16 from shared memory", (128 + 256) * 64 * 2, 2 * 128 * 256 * 64
)


@cache
def _cubin(name: str, options: tuple[str, ...]) -> bytes:
    return compile_to_cubin(kernel_source(name, ROOT), name, options).cubin


class BenchKernels:
    """The kernels of one element type on one GPU.

    Args:
        device: The GPU.
        dtype: `bfloat16` or `float16`.

    Raises:
        CompileError: NVRTC refuses a source.
    """

    def __init__(self, device: Device, dtype: str) -> None:
        self.device = device
        self.dtype = dtype
        self.architecture = architecture_of(*device.properties.capability)
        self.product_shape = WGMMA if self.architecture == "sm_90a" else MMA
        self._blocks = 8 * device.properties.multiprocessors
        memory = self._load("memory.cu")
        with device:
            self._functions = {
                name: device.driver.get_function(memory, name)
                for name in ("fill", "read", "copy", "digest", "spin")
            }
        self._product: int | None = None

    def _load(self, name: str) -> int:
        options = (
            f"--gpu-architecture={self.architecture}",
            *("--std=c++17", "-default-device", f"-DBF16={int(self.dtype == 'bfloat16')}"),
        )
        with self.device as device:
            return device.driver.load_module(_cubin(name, options))

    def _span(self, name: str, blocks: int, threads: int, **values: int) -> Launch:
        function = self._functions[name]
        return self.device.driver.launcher(function, (blocks, 1, 1), (threads, 1, 1), 0, (Span(**values),))

    def fill(self, pointer: int, nbytes: int, seed: int) -> Launch:
        """Return a launch that fills memory with normal numbers; a multiple of 16 bytes."""
        return self._span(
            "fill", self._blocks, _FILL_THREADS, out=pointer, words=nbytes // 16, seed=seed << 40
        )

    def read(self, pointer: int, nbytes: int, result: int, *, blocks: int, threads: int) -> Launch:
        """Return a launch that reads memory once and adds the exclusive or of its words to `result`."""
        return self._span("read", blocks, threads, source=pointer, words=nbytes // 16, sum=result)

    def copy(self, target: int, source: int, nbytes: int, *, blocks: int, threads: int) -> Launch:
        """Return a launch that copies memory."""
        return self._span("copy", blocks, threads, out=target, source=source, words=nbytes // 16)

    def digest(self, pointer: int, nbytes: int, result: int) -> Launch:
        """Return a launch that adds a digest and the number of values that are not finite to `result`."""
        return self._span(
            "digest", self._blocks, _FILL_THREADS, source=pointer, words=nbytes // 16, sum=result
        )

    def spin(self, cycles: int) -> Launch:
        """Return a launch of one thread that is busy for `cycles` clock cycles."""
        return self._span("spin", 1, 1, words=cycles)

    def product(self, a: int, b: int, out: int, rounds: int, blocks: int) -> Launch:
        """Return a launch of products; see the kernels for what they compute."""
        shape, driver = self.product_shape, self.device.driver
        if self._product is None:
            module = self._load(shape.source)
            with self.device:
                self._product = driver.get_function(module, "matmul")
                driver.allow_shared(self._product, shape.shared_bytes)
        params = Products(a=a, b=b, out=out, rounds=rounds)
        return driver.launcher(self._product, (blocks, 1, 1), (256, 1, 1), shape.shared_bytes, (params,))
