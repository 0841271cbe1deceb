# ruff: noqa: D102 - the methods are those of the Driver protocol
"""A driver without a GPU: memory is host memory, launches are recorded, calls are counted.

Tests of the host side run against it anywhere. It executes no kernel, so it says nothing about numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

from paged_cuda._driver import DeviceProperties, Dim, Driver, Launcher, TensorMapGeometry
from paged_cuda._fake_memory import FakeVirtualMemory
from paged_cuda.errors import DriverError

FAKE_GPU = DeviceProperties(
    name="fake GPU",
    capability=(9, 0),
    multiprocessors=4,
    shared_bytes=232_448,
    shared_bytes_multiprocessor=233_472,
    bandwidth=1e12,
)


@dataclass(frozen=True, slots=True)
class Launched:
    """One recorded launch.

    Attributes:
        function: The kernel's handle.
        symbol: Its name.
        grid: Blocks.
        block: Threads.
        shared_bytes: Dynamic shared memory.
        params: The argument struct's bytes at the moment of the launch.
        stream: Where.
        programmatic: Whether it may start before its predecessor ends.
    """

    function: int
    symbol: str
    grid: Dim
    block: Dim
    shared_bytes: int
    params: bytes
    stream: int
    programmatic: bool


class FakeDriver(FakeVirtualMemory):
    """Implements `paged_cuda._driver.Driver`.

    Attributes:
        calls: How often each method ran; launches count as `launch`.
        launched: Every launch outside captures, in order; a replay repeats its capture's.
        memory: Live device allocations by address.
        capturing: Streams under capture and what they have recorded.
        limit: Device bytes that can be allocated or created as handles; one beyond it fails.
        tensor_maps: What was last encoded at each host address.
        failing: Calls still to come of a method until one fails, by its name: 1 fails the next.
    """

    def __init__(
        self, properties: DeviceProperties = FAKE_GPU, *, devices: int = 1, limit: int = 2**32
    ) -> None:
        super().__init__(limit)
        self.launched: list[Launched] = []
        self.capturing: dict[int, list[Launched]] = {}
        self.graphs: dict[int, list[Launched]] = {}
        self.executables: dict[int, list[Launched]] = {}
        self.contexts: list[int] = []
        self.symbols: dict[int, str] = {}
        self._properties = properties
        self.tensor_maps: dict[int, TensorMapGeometry] = {}
        self._devices = devices
        self._pinned: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._next = 0x1000

    def _handle(self, call: str) -> int:
        self._enter(call)
        self._next += 0x10
        return self._next

    def device_count(self) -> int:
        return self._devices

    def version(self) -> tuple[int, int]:
        return (13, 0)

    def properties(self, ordinal: int) -> DeviceProperties:
        return self._properties

    def current_device(self) -> int | None:
        return self.contexts[-1] - 1 if self.contexts else None

    def retain_context(self, ordinal: int) -> int:
        return ordinal + 1

    def push_context(self, context: int) -> None:
        self._enter("push_context")
        self.contexts.append(context)

    def pop_context(self) -> None:
        self._enter("pop_context")
        self.contexts.pop()

    def enter_context(self, context: int) -> bool:
        self._enter("enter_context")
        if not self.contexts:
            self.contexts.append(context)
        if self.contexts[-1] == context:
            return False
        self.push_context(context)
        return True

    def allocate(self, nbytes: int) -> int:
        self._enter("allocate")
        if self.used_bytes() + nbytes > self.limit:
            raise DriverError("driver-call", "cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_SUCCESS")
        # Room to return an aligned address inside the block.
        block = ctypes.create_string_buffer(nbytes + 256)
        pointer = -(-ctypes.addressof(block) // 256) * 256
        self.memory[pointer] = block
        return pointer

    def free(self, pointer: int) -> None:
        self._enter("free")
        del self.memory[pointer]

    def allocate_pinned(self, nbytes: int) -> int:
        self._enter("allocate_pinned")
        block = ctypes.create_string_buffer(nbytes)
        self._pinned[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free_pinned(self, address: int) -> None:
        self._enter("free_pinned")
        del self._pinned[address]

    def copy_to_device(self, pointer: int, address: int, nbytes: int, stream: int) -> None:
        self._enter("copy_to_device")
        self._reach(pointer, nbytes)
        ctypes.memmove(pointer, address, nbytes)

    def copy_to_host(self, address: int, pointer: int, nbytes: int, stream: int) -> None:
        self._enter("copy_to_host")
        self._reach(pointer, nbytes)
        ctypes.memmove(address, pointer, nbytes)

    def fill(self, pointer: int, byte: int, nbytes: int, stream: int) -> None:
        self._enter("fill")
        self._reach(pointer, nbytes)
        ctypes.memset(pointer, byte, nbytes)

    def create_stream(self) -> int:
        return self._handle("create_stream")

    def destroy_stream(self, stream: int) -> None:
        self._enter("destroy_stream")

    def synchronize(self, stream: int) -> None:
        self._enter("synchronize")

    def create_event(self) -> int:
        return self._handle("create_event")

    def destroy_event(self, event: int) -> None:
        self._enter("destroy_event")

    def record_event(self, event: int, stream: int) -> None:
        self._enter("record_event")

    def wait_event(self, event: int) -> None:
        self._enter("wait_event")

    def load_module(self, cubin: bytes) -> int:
        return self._handle("load_module")

    def get_function(self, module: int, symbol: str) -> int:
        function = self._handle("get_function")
        self.symbols[function] = symbol
        return function

    def allow_shared(self, function: int, nbytes: int) -> None:
        self._enter("allow_shared")

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
        symbol = self.symbols[function]

        def launch(stream: int) -> None:
            self._enter("launch")
            told = bytes(arguments[0])
            record = Launched(function, symbol, grid, block, shared_bytes, told, stream, programmatic)
            self.capturing.get(stream, self.launched).append(record)

        return launch

    def encode_tensor_map(self, address: int, geometry: TensorMapGeometry) -> None:
        self._enter("encode_tensor_map")
        if address % 64 or geometry.address % 16 or any(stride % 16 for stride in geometry.strides):
            raise DriverError(
                "driver-call", "cuTensorMapEncodeTiled", "CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS"
            )
        self.tensor_maps[address] = geometry
        ctypes.memmove(address, hashlib.sha512(repr(geometry).encode()).digest() * 2, 128)

    def is_capturing(self, stream: int) -> bool:
        self._enter("is_capturing")
        return stream in self.capturing

    def begin_capture(self, stream: int) -> None:
        self._enter("begin_capture")
        self.capturing[stream] = []

    def end_capture(self, stream: int) -> int:
        graph = self._handle("end_capture")
        self.graphs[graph] = self.capturing.pop(stream)
        return graph

    def instantiate(self, graph: int) -> int:
        executable = self._handle("instantiate")
        self.executables[executable] = list(self.graphs[graph])
        return executable

    def upload_graph(self, executable: int, stream: int) -> None:
        self._enter("upload_graph")

    def launch_graph(self, executable: int, stream: int) -> None:
        self._enter("launch_graph")
        self.launched += self.executables[executable]

    def destroy_graph(self, graph: int) -> None:
        self._enter("destroy_graph")
        del self.graphs[graph]

    def destroy_executable(self, executable: int) -> None:
        self._enter("destroy_executable")
        del self.executables[executable]


_conforms: type[Driver] = FakeDriver
