"""One GPU, one stream, and the instruments: what every measurement is done with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from paged_cuda import Device, DeviceArray, Stream

from paged_bench.measure.counters import Counters
from paged_bench.measure.kernels import BenchKernels

Launch = Callable[[int], None]


def part_of(array: DeviceArray, offset: int, count: int, dtype: str) -> DeviceArray:
    """Return `count` elements from byte `offset` of an array on, as a vector over the same memory."""
    return DeviceArray(array.pointer + offset, (count,), (1,), dtype, array.ordinal, array.owner)


class Bench:
    """The instruments of a run.

    Attributes:
        device: The GPU.
        stream: Where everything runs.
        counters: Events and memory.
    """

    def __init__(self, device: Device, counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self.stream = Stream(device)
        self._kernels: dict[str, BenchKernels] = {}
        self._result = DeviceArray.from_numpy(np.zeros(2, np.int64), self.stream, device)

    def kernels(self, dtype: str) -> BenchKernels:
        """Return the measurement's own kernels for an element type."""
        if dtype not in self._kernels:
            self._kernels[dtype] = BenchKernels(self.device, dtype)
        return self._kernels[dtype]

    def launch(self, *launches: Launch) -> None:
        """Queue launches."""
        with self.device:
            for one in launches:
                one(self.stream.handle)

    def fill(self, array: DeviceArray, seed: int) -> None:
        """Fill a 16-bit array with normal numbers; its size is a multiple of 16 bytes."""
        if array.nbytes:
            self.launch(self.kernels(array.dtype).fill(array.pointer, array.nbytes, seed))

    def poison(self, array: DeviceArray) -> None:
        """Make every element NaN."""
        with self.device as device:
            if array.nbytes:
                device.driver.fill(array.pointer, 0xFF, array.nbytes, self.stream.handle)

    def digest(self, array: DeviceArray) -> tuple[int, int]:
        """Wait, and return a digest of the elements and their places, and how many are not finite."""
        with self.device as device:
            device.driver.fill(self._result.pointer, 0, self._result.nbytes, self.stream.handle)
            self.kernels(array.dtype).digest(array.pointer, array.nbytes, self._result.pointer)(
                self.stream.handle
            )
        value, wild = self._result.to_numpy(self.stream).tolist()
        return int(value), int(wild)

    def reading(self, pointer: int, nbytes: int, *, blocks: int, threads: int) -> Launch:
        """Return a launch that reads memory once."""
        kernels = self.kernels("bfloat16")
        return kernels.read(pointer, nbytes, self._result.pointer, blocks=blocks, threads=threads)

    def read_result(self) -> int:
        """Wait, and return the exclusive or that `reading` left, and clear it."""
        value = int(self._result.to_numpy(self.stream)[0]) & 0xFFFFFFFF
        with self.device as device:
            device.driver.fill(self._result.pointer, 0, self._result.nbytes, self.stream.handle)
        return value

    @property
    def margin(self) -> int:
        """Bytes to leave free for modules, graphs and other libraries: a 64th of the memory."""
        with self.device:
            return self.counters.memory()[1] // 64

    def used(self) -> int:
        """Return the device memory in use by anybody, bytes."""
        with self.device:
            free, total = self.counters.memory()
        return total - free

    def free(self) -> int:
        """Return the device memory that is free, bytes."""
        with self.device:
            return self.counters.memory()[0]
