"""The driver under a growing cache: one method one call, every failure typed, nothing done unasked."""

import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as real
import numpy as np
import pytest
from paged_cuda import (
    ArgumentMismatch,
    CapturedGraph,
    CudaVmmDriver,
    Device,
    DeviceArray,
    DriverError,
    PagedAttention,
    Stream,
    _driver,
)
from paged_cuda._driver import CudaDriver
from paged_cuda.dlpack import read_capsule
from paged_cuda.testing import FakeDriver
from paged_cuda.views import device_view
from paged_schema import Call

G = 2 * 1024 * 1024
SUCCESS = real.CUresult.CUDA_SUCCESS


class Bindings:
    """Answers what the generated bindings would, and keeps what they were asked."""

    def __init__(self, **answers: tuple[Any, ...]) -> None:
        self.answers = {"cuDeviceGetCount": (SUCCESS, 1), "cuDriverGetVersion": (SUCCESS, 13010), **answers}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)

        def answer(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            return self.answers.get(name, (SUCCESS,))

        return answer


@pytest.fixture
def open_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CudaDriver, Bindings]]:
    monkeypatch.setattr(_driver, "_load_library", lambda: None)
    monkeypatch.setattr(CudaDriver, "_bind", staticmethod(lambda *_: lambda *_: 0))

    def opened(**answers: tuple[Any, ...]) -> tuple[CudaDriver, Bindings]:
        bindings = Bindings(**answers)
        monkeypatch.setattr("cuda.bindings.driver", bindings)
        driver = CudaDriver()
        bindings.calls.clear()
        return driver, bindings

    return opened


@pytest.fixture
def vmm(device: Device) -> CudaVmmDriver:
    return CudaVmmDriver(device)


def committed(vmm: CudaVmmDriver, granules: int, reserved: int = 8) -> tuple[int, list[int]]:
    """Reserve, and back the first granules."""
    address = vmm.reserve_addresses(reserved * G, G)
    handles = [vmm.create_handle(G) for _ in range(granules)]
    for index, handle in enumerate(handles):
        vmm.map_handle(address + index * G, G, handle)
    if granules:
        vmm.set_access(address, granules * G)
    return address, handles


def test_the_calls_carry_pinned_memory_of_the_right_gpu(open_driver: Callable[..., Any]) -> None:
    driver, bindings = open_driver(
        cuMemGetAllocationGranularity=(SUCCESS, G),
        cuMemAddressReserve=(SUCCESS, 0x10_0000),
        cuMemCreate=(SUCCESS, 77),
        cuMemGetInfo=(SUCCESS, 3, 5),
    )
    assert driver.granularity(3) == (G, G)
    kinds = real.CUmemAllocationGranularity_flags
    assert [call[1][1] for call in bindings.calls] == [
        kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        kinds.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
    ]
    bindings.calls.clear()
    assert driver.reserve_addresses(4 * G, G) == 0x10_0000
    assert driver.create_handle(G, 3) == 77
    driver.map_handle(0x10_0000, G, 77)
    driver.set_access(0x10_0000, G, 3, writable=True)
    driver.set_access(0x10_0000, G, 3, writable=False)
    driver.unmap(0x10_0000, G)
    driver.release_handle(77)
    driver.free_addresses(0x10_0000, 4 * G)
    assert driver.memory_info() == (3, 5)
    names = [name for name, _ in bindings.calls]
    assert names == [
        *("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemSetAccess"),
        *("cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuMemGetInfo"),
    ]
    arguments = dict(bindings.calls)
    size, properties, flags = arguments["cuMemCreate"]
    assert (size, flags, properties.location.id) == (G, 0, 3)
    assert properties.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert properties.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert arguments["cuMemMap"] == (0x10_0000, G, 0, 77, 0)
    access = [call[1][2][0] for call in bindings.calls if call[0] == "cuMemSetAccess"]
    wanted = real.CUmemAccess_flags
    assert [one.flags for one in access] == [
        wanted.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        wanted.CU_MEM_ACCESS_FLAGS_PROT_READ,
    ]
    assert [one.location.id for one in access] == [3, 3]


def test_a_failed_call_says_which_and_with_what_number(open_driver: Callable[..., Any]) -> None:
    refused = real.CUresult.CUDA_ERROR_INVALID_VALUE
    driver, _ = open_driver(
        cuMemMap=(refused,), cuMemGetInfo=(refused, 0, 0), cuEventQuery=(real.CUresult.CUDA_ERROR_NOT_READY,)
    )
    with pytest.raises(DriverError, match="cuMemMap") as caught:
        driver.map_handle(G, G, 7)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.code, again.subject, again.got) == (int(refused), "cuMemMap", refused.name)
    with pytest.raises(DriverError, match="cuMemGetInfo"):
        driver.memory_info()
    assert driver.event_done(5) is False
    driver, _ = open_driver(cuEventQuery=(refused,))
    with pytest.raises(DriverError, match="cuEventQuery"):
        driver.event_done(5)


def test_a_life_from_reserve_to_free(vmm: CudaVmmDriver, driver: FakeDriver) -> None:
    free, total = vmm.memory_info()
    address, handles = committed(vmm, 3)
    assert vmm.memory_info() == (free - 3 * G, total)
    stream, event = driver.create_stream(), vmm.create_event()
    vmm.fill(address, 0x5A, 2 * G, stream)
    vmm.copy_on_device(address + 2 * G, address, 64, stream)
    vmm.record_event(event, stream)
    vmm.stream_wait_event(stream, event)
    assert vmm.event_done(event)
    vmm.wait_event(event)
    vmm.synchronize(stream)
    read = np.empty(64, np.uint8)
    driver.copy_to_host(read.ctypes.data, address + 2 * G, 64, stream)
    assert (read == 0x5A).all()
    vmm.destroy_event(event)
    for index, handle in enumerate(handles):
        vmm.unmap(address + index * G, G)
        vmm.release_handle(handle)
    vmm.free_addresses(address, 8 * G)
    block = vmm.allocate(256)
    vmm.free(block)
    assert vmm.memory_info() == (free, total)
    assert (driver.reservations, driver.handles, driver.mappings, driver.memory) == ({}, {}, {}, {})
    assert driver.contexts == []


CALLS: dict[str, Callable[[CudaVmmDriver, int, list[int]], object]] = {
    "granularity": lambda vmm, _, __: vmm.granularity(),
    "memory_info": lambda vmm, _, __: vmm.memory_info(),
    "reserve_addresses": lambda vmm, _, __: vmm.reserve_addresses(G, G),
    "free_addresses": lambda vmm, address, __: vmm.free_addresses(address, 8 * G),
    "create_handle": lambda vmm, _, __: vmm.create_handle(G),
    "release_handle": lambda vmm, _, handles: vmm.release_handle(handles[0]),
    "map_handle": lambda vmm, address, handles: vmm.map_handle(address + 4 * G, G, handles[0]),
    "unmap": lambda vmm, address, _: vmm.unmap(address, G),
    "set_access": lambda vmm, address, _: vmm.set_access(address, G, writable=False),
    "fill": lambda vmm, address, _: vmm.fill(address, 1, G, 0),
    "copy_on_device": lambda vmm, address, _: vmm.copy_on_device(address, address + G, G, 0),
    "create_event": lambda vmm, _, __: vmm.create_event(),
    "destroy_event": lambda vmm, _, __: vmm.destroy_event(1),
    "record_event": lambda vmm, _, __: vmm.record_event(1, 0),
    "event_done": lambda vmm, _, __: vmm.event_done(1),
    "wait_event": lambda vmm, _, __: vmm.wait_event(1),
    "stream_wait_event": lambda vmm, _, __: vmm.stream_wait_event(0, 1),
    "synchronize": lambda vmm, _, __: vmm.synchronize(0),
    "allocate": lambda vmm, _, __: vmm.allocate(16),
    "free": lambda vmm, _, __: vmm.free(1),
}


def test_every_call_of_the_protocol_can_be_made_to_fail() -> None:
    others = {"array", "device"}
    assert {name for name in dir(CudaVmmDriver) if not name.startswith("_")} - others == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_an_injected_failure_changes_nothing(name: str, vmm: CudaVmmDriver, driver: FakeDriver) -> None:
    address, handles = committed(vmm, 2)

    def state() -> tuple[Any, ...]:
        return (
            dict(driver.reservations),
            {handle: (one.mappings, one.released) for handle, one in driver.handles.items()},
            {start: (one.handle, one.writable) for start, one in driver.mappings.items()},
            dict(driver.memory),
        )

    before = state()
    driver.failing[name] = 1
    with pytest.raises(DriverError):
        CALLS[name](vmm, address, handles)
    assert state() == before
    assert driver.contexts == []
    assert driver.failing == {}


def test_impossible_sequences_are_refused_as_a_driver_does(vmm: CudaVmmDriver) -> None:
    address, handles = committed(vmm, 2)
    spare = vmm.create_handle(G)
    wrong: list[Callable[[], object]] = [
        lambda: vmm.map_handle(address, G, spare),  # over what is mapped
        lambda: vmm.map_handle(address + 8 * G, G, spare),  # outside the reservation
        lambda: vmm.map_handle(address + 4 * G + 64, G, spare),  # off the granule
        lambda: vmm.map_handle(address + 4 * G, G, 999),  # no such handle
        lambda: vmm.unmap(address + 4 * G, G),  # not mapped
        lambda: vmm.unmap(address, G // 2),  # a part of a mapping
        lambda: vmm.set_access(address, 3 * G),  # a hole at the end
        lambda: vmm.free_addresses(address, 8 * G),  # still mapped
        lambda: vmm.fill(address + G, 0, 2 * G, 0),  # past the committed end
        lambda: vmm.release_handle(999),
        lambda: vmm.create_handle(100),
        lambda: vmm.reserve_addresses(100, G),
    ]
    for attempt in wrong:
        with pytest.raises(DriverError):
            attempt()
    vmm.release_handle(handles[0])  # memory stays while it is mapped
    with pytest.raises(DriverError):
        vmm.release_handle(handles[0])


def test_memory_without_access_is_out_of_reach(vmm: CudaVmmDriver) -> None:
    address = vmm.reserve_addresses(G, G)
    vmm.map_handle(address, G, vmm.create_handle(G))
    with pytest.raises(DriverError):
        vmm.fill(address, 0, 16, 0)
    vmm.set_access(address, G)
    vmm.fill(address, 0, 16, 0)


def test_nothing_is_mapped_while_a_graph_is_captured(vmm: CudaVmmDriver, device: Device) -> None:
    address, handles = committed(vmm, 1)
    changing = ("reserve_addresses", "free_addresses", "create_handle", "release_handle", "map_handle")
    with CapturedGraph(Stream(device)):
        for name in (*changing, "unmap", "set_access", "allocate", "free"):
            with pytest.raises(DriverError, match="capture"):
                CALLS[name](vmm, address, handles)
        assert vmm.event_done(1)
    vmm.create_handle(G)


def test_an_arena_that_is_forgotten_calls_no_driver(device: Device, driver: FakeDriver) -> None:
    vmm = CudaVmmDriver(device)
    address, _ = committed(vmm, 2)
    array = vmm.array(address, (4, 16), "float16", owner=vmm)
    before = driver.calls.copy()
    del vmm, array
    gc.collect()
    assert driver.calls == before
    assert driver.mappings


def test_out_of_memory_is_the_drivers_word() -> None:
    vmm = CudaVmmDriver(Device(FakeDriver(limit=3 * G), 0))
    for _ in range(3):
        vmm.create_handle(G)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        vmm.create_handle(G)


def test_a_head_major_stride_survives_every_door(vmm: CudaVmmDriver) -> None:
    """(blocks, 16, 2 heads, 64) over two stripes of 1,024 tokens each."""
    address, _ = committed(vmm, 1)
    strides = (16 * 64, 64, 1024 * 64, 1)
    cache = vmm.array(address, (64, 16, 2, 64), "float16", strides=strides)
    interface = cache.__cuda_array_interface__
    assert interface["strides"] == tuple(2 * step for step in strides)
    assert interface["data"] == (address, False)
    read = read_capsule(cache.__dlpack__())
    assert (read.pointer, read.shape, read.strides) == (address, (64, 16, 2, 64), strides)
    assert device_view(cache, "key_cache") is cache


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (-2, (4,), None),
        (8 * G - 2, (2,), None),
        (0, (2, 4 * G), None),
        (0, (2, 2), (4 * G, 1)),
        (0, (2, 2), (-1, 1)),
        (9 * G, (1,), None),
    ],
)
def test_an_array_outside_its_reservation_is_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, vmm: CudaVmmDriver
) -> None:
    address, _ = committed(vmm, 0)
    with pytest.raises(ArgumentMismatch, match="reservation"):
        vmm.array(address + offset, shape, "float16", strides=strides)
    assert vmm.array(address, (8 * G // 2,), "float16").nbytes == 8 * G
    assert vmm.array(address, (0, 5), "float16").nbytes == 0


def test_an_array_is_made_while_another_thread_reserves(vmm: CudaVmmDriver) -> None:
    class Meanwhile(int):
        """A size; whoever adds it up is interrupted by a thread that reserves."""

        def __radd__(self, start: int) -> int:
            thread = threading.Thread(target=vmm.reserve_addresses, args=(G, G))
            thread.start()
            thread.join()
            return start + int(self)

    low, high = sorted(vmm.reserve_addresses(G, G) for _ in range(2))
    vmm._reserved = {low: Meanwhile(G), high: G}
    assert vmm.array(high, (4,), "float16").pointer == high
    assert len(vmm._reserved) == 3


def test_the_operator_takes_reserved_memory_as_its_cache(
    vmm: CudaVmmDriver,
    driver: FakeDriver,
    device: Device,
    make_call: Callable[..., Call],
    make_operator: Callable[..., PagedAttention],
    make_operands: Callable[..., dict[str, Any]],
) -> None:
    call = make_call()
    op = make_operator(call).prepare()
    operands = make_operands(call)
    address, _ = committed(vmm, 1)
    blocks = 8 * G // (16 * 192 * 2)
    operands["key_cache"] = cache = vmm.array(address, (blocks, 16, 1, 192), "bfloat16")
    stream = Stream(device)
    op.run(**operands, stream=stream)
    assert isinstance(cache, DeviceArray)
    assert op._params.key_cache == address
    assert op._params.num_blocks == blocks
    assert driver.launched
