"""The NVIDIA driver behind one typed protocol; the only module, with `_nvrtc`, that imports `cuda.*`.

Handles are plain integers. Nothing is imported or opened before `require_driver`, and it looks for the
driver's library first: on a machine without one, some of the wrapped calls never return.

The calls of a step go straight to the library. Through the generated bindings one launch costs several
times what the driver itself needs, most of it for converting arguments that here never change.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paged_cuda._virtual_memory import VirtualMemory, VirtualMemoryCalls, failure
from paged_cuda.errors import NoDriver

Dim = tuple[int, int, int]
Launcher = Callable[[int], None]
MINIMUM_VERSION = (13, 0)


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What the host side decides by.

    Attributes:
        name: The GPU's product name.
        capability: Compute capability (major, minor).
        multiprocessors: Streaming multiprocessors.
        shared_bytes: Most shared memory a block may opt in to.
        shared_bytes_multiprocessor: Shared memory of a multiprocessor.
        bandwidth: Peak device memory bytes a second by clock and bus width; 0 where the driver does not say.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    shared_bytes_multiprocessor: int
    bandwidth: float


class TensorMapGeometry(NamedTuple):
    """A tensor of 16-bit elements as the copy engine sees it, innermost dimension first.

    Attributes:
        address: Of its first element.
        extents: Elements of each dimension.
        strides: Bytes from one element to the next, of every dimension but the first.
        box: Elements that one copy moves.
    """

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Driver(VirtualMemory, Protocol):
    """What this package needs of a driver. Every failure is a `DriverError`."""

    def device_count(self) -> int: ...
    def version(self) -> tuple[int, int]: ...
    def properties(self, ordinal: int) -> DeviceProperties: ...
    def current_device(self) -> int | None: ...
    def retain_context(self, ordinal: int) -> int: ...
    def push_context(self, context: int) -> None: ...
    def pop_context(self) -> None: ...
    def enter_context(self, context: int) -> bool: ...

    def allocate(self, nbytes: int) -> int: ...
    def free(self, pointer: int) -> None: ...
    def allocate_pinned(self, nbytes: int) -> int: ...
    def free_pinned(self, address: int) -> None: ...
    def copy_to_device(self, pointer: int, address: int, nbytes: int, stream: int) -> None: ...
    def copy_to_host(self, address: int, pointer: int, nbytes: int, stream: int) -> None: ...
    def fill(self, pointer: int, byte: int, nbytes: int, stream: int) -> None: ...

    def create_stream(self) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def synchronize(self, stream: int) -> None: ...
    def create_event(self) -> int: ...
    def destroy_event(self, event: int) -> None: ...
    def record_event(self, event: int, stream: int) -> None: ...
    def wait_event(self, event: int) -> None: ...

    def load_module(self, cubin: bytes) -> int: ...
    def get_function(self, module: int, symbol: str) -> int: ...
    def allow_shared(self, function: int, nbytes: int) -> None: ...
    def launcher(
        self,
        function: int,
        grid: Dim,
        block: Dim,
        shared_bytes: int,
        arguments: tuple[ctypes.Structure, ...],
        *,
        programmatic: bool = False,
    ) -> Launcher: ...
    def encode_tensor_map(self, address: int, geometry: TensorMapGeometry) -> None: ...

    def is_capturing(self, stream: int) -> bool: ...
    def begin_capture(self, stream: int) -> None: ...
    def end_capture(self, stream: int) -> int: ...
    def instantiate(self, graph: int) -> int: ...
    def upload_graph(self, executable: int, stream: int) -> None: ...
    def launch_graph(self, executable: int, stream: int) -> None: ...
    def destroy_graph(self, graph: int) -> None: ...
    def destroy_executable(self, executable: int) -> None: ...


_driver: Driver | None = None


def require_driver() -> Driver:
    """Return the driver, opened once a process.

    Raises:
        NoDriver: There is no driver library, it is too old, or it sees no GPU.
    """
    global _driver
    if _driver is None:
        _driver = CudaDriver()
    return _driver


def _load_library() -> ctypes.CDLL:
    from cuda import pathfinder

    try:
        found = pathfinder.load_nvidia_dynamic_lib("cuda")
    except pathfinder.DynamicLibNotFoundError:
        advice = "an NVIDIA driver; install one, or run on the CPU with paged_oracle"
        raise NoDriver("driver", "libcuda", "no such library", advice) from None
    return ctypes.CDLL(found.abs_path or "libcuda.so.1")


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint64 * 8))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# Values of cuda.h. A map moves bits, so any 16-bit type will do.
_TENSOR_MAP_16_BIT = 1
_TENSOR_MAP_NO_INTERLEAVE = 0
_TENSOR_MAP_SWIZZLE_128B = 3
_TENSOR_MAP_L2_128B = 2
_TENSOR_MAP_ZEROS_OUTSIDE = 0
_HOT: dict[str, tuple[type[ctypes._SimpleCData[Any]], ...]] = {
    "cuLaunchKernelEx": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    "cuGraphLaunch": (ctypes.c_void_p, ctypes.c_void_p),
    "cuStreamIsCapturing": (ctypes.c_void_p, ctypes.c_void_p),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.c_void_p,),
    "cuCtxGetCurrent": (ctypes.c_void_p,),
    "cuTensorMapEncodeTiled": (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    ),
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
}


class _Answers(threading.local):
    """Where the driver writes what `run` asks of it; made once a thread."""

    def __init__(self) -> None:
        self.context = ctypes.c_void_p()
        self.context_at = ctypes.addressof(self.context)
        self.capture = ctypes.c_int()
        self.capture_at = ctypes.addressof(self.capture)


class CudaDriver(VirtualMemoryCalls):
    """The real driver."""

    def __init__(self) -> None:
        library = _load_library()
        from cuda.bindings import driver

        self._cuda = driver
        self._hot = {name: self._bind(library, name, types) for name, types in _HOT.items()}
        self._get_current = self._hot["cuCtxGetCurrent"]
        self._ask_capture = self._hot["cuStreamIsCapturing"]
        self._answers = _Answers()
        (status,) = driver.cuInit(0)
        if int(status) != 0:
            raise NoDriver(
                "driver", "cuInit", status.name, "a visible NVIDIA GPU; see python -m paged_cuda doctor"
            )
        if self.device_count() == 0:
            raise NoDriver("driver", "libcuda", "no GPU", "a visible NVIDIA GPU; check CUDA_VISIBLE_DEVICES")
        if self.version() < MINIMUM_VERSION:
            wanted = "a driver for CUDA {}.{} or newer; update the NVIDIA driver".format(*MINIMUM_VERSION)
            raise NoDriver("driver-version", "libcuda", "CUDA {}.{}".format(*self.version()), wanted)

    @staticmethod
    def _bind(library: ctypes.CDLL, name: str, types: tuple[type[Any], ...]) -> Callable[..., int]:
        function = library[name]
        function.argtypes = types
        function.restype = ctypes.c_int
        return function

    def _check(self, status: int, name: str) -> None:
        if status != 0:
            raise failure(name, self._cuda.CUresult(status))

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def version(self) -> tuple[int, int]:
        version = int(self._call("cuDriverGetVersion"))
        return version // 1000, version % 1000 // 10

    def properties(self, ordinal: int) -> DeviceProperties:
        device = self._call("cuDeviceGet", ordinal)
        kinds = self._cuda.CUdevice_attribute

        def attribute(name: str) -> int:
            return int(
                self._call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
            )

        # Two transfers a clock, kilohertz and bits.
        bandwidth = 2.0 * attribute("MEMORY_CLOCK_RATE") * 1e3 * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
        name = self._call("cuDeviceGetName", 128, device)
        return DeviceProperties(
            name=name.split(b"\0")[0].decode(),
            capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
            shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            shared_bytes_multiprocessor=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            bandwidth=bandwidth,
        )

    def current_device(self) -> int | None:
        if int(self._call("cuCtxGetCurrent")) == 0:
            return None
        return int(self._call("cuCtxGetDevice"))

    def retain_context(self, ordinal: int) -> int:
        return int(self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal)))

    def push_context(self, context: int) -> None:
        self._check(self._hot["cuCtxPushCurrent_v2"](context), "cuCtxPushCurrent")

    def pop_context(self) -> None:
        popped = ctypes.c_void_p()
        self._check(self._hot["cuCtxPopCurrent_v2"](ctypes.addressof(popped)), "cuCtxPopCurrent")

    def enter_context(self, context: int) -> bool:
        """Make `context` current and return whether that hid another one, which `pop_context` brings back.

        A thread without a context keeps this one, as it would after any call of the CUDA runtime.
        """
        answers = self._answers
        status = self._get_current(answers.context_at)
        if status:
            self._check(status, "cuCtxGetCurrent")
        current = answers.context.value
        if current == context:
            return False
        if current is None:
            self._call("cuCtxSetCurrent", context)
            return False
        self.push_context(context)
        return True

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, pointer: int) -> None:
        # The garbage collector may run this while somebody's capture is open; relaxed mode keeps that
        # capture valid.
        relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            self._call("cuMemFree", pointer)
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", before)

    def allocate_pinned(self, nbytes: int) -> int:
        return int(self._call("cuMemHostAlloc", nbytes, 0))

    def free_pinned(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def copy_to_device(self, pointer: int, address: int, nbytes: int, stream: int) -> None:
        self._check(self._hot["cuMemcpyHtoDAsync_v2"](pointer, address, nbytes, stream), "cuMemcpyHtoDAsync")

    def copy_to_host(self, address: int, pointer: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", address, pointer, nbytes, stream)

    def fill(self, pointer: int, byte: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", pointer, byte, nbytes, stream)

    def create_stream(self) -> int:
        return int(self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> int:
        return int(self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait_event(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def load_module(self, cubin: bytes) -> int:
        return int(self._call("cuModuleLoadData", cubin))

    def get_function(self, module: int, symbol: str) -> int:
        function = self._call("cuModuleGetFunction", module, symbol.encode())
        self._call("cuFuncLoad", function)
        return int(function)

    def allow_shared(self, function: int, nbytes: int) -> None:
        kinds = self._cuda.CUfunction_attribute
        handle = self._cuda.CUfunction(function)
        kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", handle, kind, nbytes)
        # All kernels of a step ask for the same division of L1 and shared memory: a change of it between two
        # kernels cost 3.5 to 4.6 us a step on an H200.
        carveout = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._call("cuFuncSetAttribute", handle, carveout, 100)

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
        attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        config = _LaunchConfig(
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            attributes=ctypes.pointer(attribute),
            num_attributes=int(programmatic),
        )
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        config_at, pointers_at = ctypes.addressof(config), ctypes.addressof(pointers)
        call, check, last = self._hot["cuLaunchKernelEx"], self._check, 0

        # The defaults keep alive what the driver reads by address.
        def launch(stream: int, _kept: object = (attribute, arguments, pointers)) -> None:
            nonlocal last
            if stream != last:
                config.stream = last = stream
            status = call(config_at, function, pointers_at, None)
            if status:
                check(status, "cuLaunchKernelEx")

        return launch

    def encode_tensor_map(self, address: int, geometry: TensorMapGeometry) -> None:
        rank = len(geometry.extents)
        status = self._hot["cuTensorMapEncodeTiled"](
            address,
            _TENSOR_MAP_16_BIT,
            rank,
            geometry.address,
            (ctypes.c_uint64 * rank)(*geometry.extents),
            (ctypes.c_uint64 * (rank - 1))(*geometry.strides),
            (ctypes.c_uint32 * rank)(*geometry.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            _TENSOR_MAP_NO_INTERLEAVE,
            _TENSOR_MAP_SWIZZLE_128B,
            _TENSOR_MAP_L2_128B,
            _TENSOR_MAP_ZEROS_OUTSIDE,
        )
        if status:
            self._check(status, "cuTensorMapEncodeTiled")

    def is_capturing(self, stream: int) -> bool:
        answers = self._answers
        status = self._ask_capture(stream, answers.capture_at)
        if status:
            self._check(status, "cuStreamIsCapturing")
        return answers.capture.value != 0

    def begin_capture(self, stream: int) -> None:
        # Relaxed: the body of a capture may allocate or free on the host without breaking it.
        self._call(
            "cuStreamBeginCapture", stream, self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )

    def end_capture(self, stream: int) -> int:
        return int(self._call("cuStreamEndCapture", stream))

    def instantiate(self, graph: int) -> int:
        return int(self._call("cuGraphInstantiate", self._cuda.CUgraph(graph), 0))

    def upload_graph(self, executable: int, stream: int) -> None:
        self._call("cuGraphUpload", self._cuda.CUgraphExec(executable), stream)

    def launch_graph(self, executable: int, stream: int) -> None:
        status = self._hot["cuGraphLaunch"](executable, stream)
        if status:
            self._check(status, "cuGraphLaunch")

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphDestroy", self._cuda.CUgraph(graph))

    def destroy_executable(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", self._cuda.CUgraphExec(executable))
