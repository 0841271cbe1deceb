import ctypes
import gc
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cuda import ArgumentMismatch, Device, DeviceArray, Stream
from paged_cuda.dlpack import _exports, read_capsule
from paged_cuda.stream import stream_handle
from paged_cuda.testing import FakeDriver
from paged_cuda.views import UNKNOWN_DEVICE, device_view


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint8", ml_dtypes.bfloat16])
def test_round_trip(device: Device, dtype: Any) -> None:
    host = np.arange(24).reshape(2, 3, 4).astype(dtype)
    array = DeviceArray.from_numpy(host, 7, device)
    back = array.to_numpy(7)
    assert back.dtype == host.dtype
    np.testing.assert_array_equal(back, host)


def test_bfloat16_bits_travel_as_uint16(device: Device) -> None:
    bits = np.arange(6, dtype=np.uint16)
    array = DeviceArray.from_numpy(bits, 7, device, dtype="bfloat16")
    assert array.dtype == "bfloat16"
    np.testing.assert_array_equal(array.to_numpy(7, raw=True), bits)
    with pytest.raises(ArgumentMismatch):
        DeviceArray.from_numpy(np.zeros(3, np.float32), 7, device, dtype="bfloat16")


def test_memory_goes_with_the_last_owner(driver: FakeDriver, device: Device) -> None:
    array = DeviceArray.empty((5,), "float32", device)
    capsule = array.__dlpack__()
    del array
    gc.collect()
    assert len(driver.memory) == 1
    del capsule
    gc.collect()
    assert driver.memory == {}
    assert _exports == {}


def test_a_consumed_capsule_lives_until_its_consumer_deletes_it(driver: FakeDriver, device: Device) -> None:
    array = DeviceArray.empty((5,), "float32", device)
    capsule = array.__dlpack__()
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
    name = ctypes.c_char_p(b"used_dltensor")
    rename(capsule, name)
    (managed,) = (kept[0] for kept in _exports.values())
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)
    address = ctypes.addressof(managed)
    del array, capsule, managed
    gc.collect()
    assert len(driver.memory) == 1
    deleter(address)
    gc.collect()
    assert driver.memory == {}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    dtype=st.sampled_from(["float16", "bfloat16", "int32", "float32"]),
)
def test_every_door_leads_to_the_same_view(device: Device, shape: tuple[int, ...], dtype: str) -> None:
    array = DeviceArray.empty(shape, dtype, device)
    by_dlpack = device_view(
        SimpleNamespace(__dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__), "x"
    )
    by_interface = device_view(SimpleNamespace(__cuda_array_interface__=array.__cuda_array_interface__), "x")
    for view in (by_dlpack, by_interface):
        assert (view.pointer, view.shape, view.strides, view.dtype) == (
            array.pointer,
            array.shape,
            array.strides,
            array.dtype,
        )
    assert (by_dlpack.ordinal, by_interface.ordinal) == (0, UNKNOWN_DEVICE)
    assert device_view(array, "x") is array


def test_dlpack_reads_a_real_producer() -> None:
    host = np.arange(24, dtype=np.int32).reshape(4, 6)[1:, ::2]
    read = read_capsule(host.__dlpack__())
    assert (read.pointer, read.shape, read.strides) == (host.ctypes.data, (3, 3), (6, 2))
    assert (read.kind, read.device[0]) == ((0, 32), 1)


@pytest.mark.parametrize(("module", "asked"), [("cupy", -1), ("jaxlib._jax", None)])
def test_no_producer_is_asked_to_synchronise(module: str, asked: int | None, device: Device) -> None:
    array, seen = DeviceArray.empty((3,), "float16", device), []

    def export(self: object, *, stream: int | None) -> object:
        seen.append(stream)
        return array.__dlpack__()

    producer = type(
        "Array", (), {"__dlpack__": export, "__dlpack_device__": lambda self: (2, 0), "__module__": module}
    )
    assert device_view(producer(), "x").pointer == array.pointer
    assert seen == [asked]


def test_torch_accessors_are_read(device: Device) -> None:
    def tensor(*, is_cuda: bool) -> Any:
        return SimpleNamespace(
            is_cuda=is_cuda,
            device="cuda:0" if is_cuda else "cpu",
            dtype="torch.bfloat16",
            shape=(2, 3),
            data_ptr=lambda: 4096,
            stride=lambda: (3, 1),
            get_device=lambda: 0,
        )

    view = device_view(tensor(is_cuda=True), "query")
    assert (view.pointer, view.shape, view.strides, view.dtype) == (4096, (2, 3), (3, 1), "bfloat16")
    with pytest.raises(ArgumentMismatch, match="cpu"):
        device_view(tensor(is_cuda=False), "query")


@pytest.mark.parametrize("thing", [np.zeros(3), np.float32(1), [1, 2], None, 4096, "query"])
def test_what_is_no_device_array_is_refused_by_name(thing: object) -> None:
    with pytest.raises(ArgumentMismatch) as caught:
        device_view(thing, "query")
    assert caught.value.subject == "query"


def test_cpu_dlpack_and_foreign_types_are_refused(device: Device) -> None:
    cpu = SimpleNamespace(__dlpack__=lambda **_: None, __dlpack_device__=lambda: (1, 0))
    with pytest.raises(ArgumentMismatch, match="DLPack device type 1"):
        device_view(cpu, "key")
    for change in ({"typestr": "<f8"}, {"strides": (3,)}):
        interface = {**DeviceArray.empty((4,), "float16", device).__cuda_array_interface__, **change}
        with pytest.raises(ArgumentMismatch):
            device_view(SimpleNamespace(__cuda_array_interface__=interface), "key")


def test_pointers_and_buffers_are_wrapped(device: Device) -> None:
    assert DeviceArray.from_pointer(4096, (2, 8), "float16", device).strides == (8, 1)
    buffer = SimpleNamespace(handle=8192, size=32)
    wrapped = DeviceArray.from_pointer(buffer, (2, 8), "float16", device)
    assert (wrapped.pointer, wrapped.owner) == (8192, buffer)
    with pytest.raises(ArgumentMismatch, match="at least 34"):
        DeviceArray.from_pointer(buffer, (2, 8), "float16", device, strides=(9, 1))


def test_to_numpy_refuses_gaps(device: Device) -> None:
    memory = DeviceArray.empty((32,), "float16", device)
    with pytest.raises(ArgumentMismatch, match="contiguous"):
        DeviceArray(memory.pointer, (2, 8), (16, 1), "float16", 0, memory).to_numpy(7)


def test_streams_are_read_from_whatever_names_one(device: Device) -> None:
    stream = Stream(device)
    assert stream_handle(stream) == stream.handle
    assert stream_handle(5) == 5
    assert stream_handle(SimpleNamespace(__cuda_stream__=(0, 6))) == 6
    assert stream_handle(SimpleNamespace(cuda_stream=7)) == 7
    assert stream_handle(SimpleNamespace(ptr=8)) == 8
    with pytest.raises(ArgumentMismatch):
        stream_handle("default")


@pytest.mark.parametrize("shape", [(-1, 2), (1.5,), 3, ("2",), None])
def test_a_shape_that_is_none_allocates_nothing(shape: Any, driver: FakeDriver, device: Device) -> None:
    for make in (
        lambda: DeviceArray.empty(shape, "float16", device),
        lambda: DeviceArray.from_pointer(4096, shape, "float16", device),
    ):
        with pytest.raises(ArgumentMismatch, match="shape"):
            make()
    assert driver.calls["allocate"] == 0


def test_a_wrapped_address_has_a_known_type_and_a_stride_a_dimension(device: Device) -> None:
    with pytest.raises(ArgumentMismatch, match="strides"):
        DeviceArray.from_pointer(4096, (2, 3), "float16", device, strides=(1,))
    with pytest.raises(ArgumentMismatch, match="dtype"):
        DeviceArray.from_pointer(4096, (2, 3), "float8", device)


@pytest.mark.parametrize("dtype", [">i4", ">f4", ">f2", "<i4"])
def test_foreign_byte_order_is_turned(dtype: str, device: Device) -> None:
    host = np.arange(5).astype(dtype)
    np.testing.assert_array_equal(DeviceArray.from_numpy(host, 7, device).to_numpy(7), host)


def test_bfloat16_without_its_package_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    array = DeviceArray.from_numpy(np.arange(3, dtype=np.uint16), 7, device, dtype="bfloat16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ArgumentMismatch, match="pip install ml-dtypes"):
        array.to_numpy(7)
    assert array.to_numpy(7, raw=True).tolist() == [0, 1, 2]


def test_an_array_shows_what_it_is(device: Device) -> None:
    array = DeviceArray.empty((2, 3), "bfloat16", device)
    assert repr(array) == "DeviceArray(shape=(2, 3), dtype='bfloat16', device=0)"
    assert array.nbytes == 12
