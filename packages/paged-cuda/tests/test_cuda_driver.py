"""The real driver class against stand-ins for the library and its bindings: errors, versions, structs."""

import ctypes
from typing import Any

import cuda.bindings.driver as real
import pytest
from cuda import pathfinder
from paged_cuda import ArgumentMismatch, Device, DriverError, NoDriver, Stream, _driver
from paged_cuda._driver import CudaDriver, _LaunchAttribute, _LaunchConfig
from paged_cuda.device import resolve_device
from paged_cuda.testing import FakeDriver

SUCCESS, FAILURE = real.CUresult.CUDA_SUCCESS, real.CUresult.CUDA_ERROR_INVALID_VALUE


class Library:
    """Answers the calls that go straight to the library."""

    def __init__(self) -> None:
        self.status = 0
        self.launched: list[tuple[_LaunchConfig, int, int]] = []
        self.calls: list[str] = []

    def __getitem__(self, name: str) -> Any:
        def answer(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuLaunchKernelEx":
                config = _LaunchConfig.from_buffer_copy(
                    ctypes.string_at(arguments[0], ctypes.sizeof(_LaunchConfig))
                )
                self.launched.append((config, arguments[1], arguments[2]))
            if name == "cuStreamIsCapturing":
                ctypes.c_int.from_address(arguments[1]).value = 1
            return self.status

        types = _driver._HOT[name]
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(answer)


class Bindings:
    """Answers what the generated bindings would, from a table."""

    def __init__(self, **answers: tuple[Any, ...]) -> None:
        self.answers = {
            "cuInit": (SUCCESS,),
            "cuDeviceGetCount": (SUCCESS, 1),
            "cuDriverGetVersion": (SUCCESS, 13010),
            **answers,
        }
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)

        def answer(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            return self.answers.get(name, (SUCCESS,))

        return answer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(_driver, "_load_library", lambda: library)
    return library


def opened(monkeypatch: pytest.MonkeyPatch, **answers: tuple[Any, ...]) -> tuple[CudaDriver, Bindings]:
    bindings = Bindings(**answers)
    monkeypatch.setattr("cuda.bindings.driver", bindings)
    return CudaDriver(), bindings


def test_no_library_is_told_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", absent)
    for _ in range(2):  # the second touch is the one that used to hang
        with pytest.raises(NoDriver, match="install"):
            CudaDriver()


@pytest.mark.parametrize(
    ("answers", "rule", "word"),
    [
        ({"cuInit": (real.CUresult.CUDA_ERROR_NO_DEVICE,)}, "driver", "CUDA_ERROR_NO_DEVICE"),
        ({"cuDeviceGetCount": (SUCCESS, 0)}, "driver", "no GPU"),
        ({"cuDriverGetVersion": (SUCCESS, 12080)}, "driver-version", "12.8"),
    ],
)
def test_an_unusable_driver_is_told_with_advice(
    answers: dict[str, Any], rule: str, word: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoDriver, match=word) as caught:
        opened(monkeypatch, **answers)
    assert caught.value.rule == rule


def test_a_failed_call_names_itself(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _ = opened(monkeypatch, cuMemAlloc=(real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0))
    with pytest.raises(DriverError) as caught:
        driver.allocate(8)
    assert (caught.value.subject, caught.value.got) == ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    library.status = int(FAILURE)
    for attempt in (
        lambda: driver.push_context(1),
        driver.pop_context,
        lambda: driver.is_capturing(7),
        lambda: driver.launch_graph(1, 7),
        lambda: driver.copy_to_device(1, 2, 3, 7),
    ):
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            attempt()


def test_freeing_inside_a_capture_is_relaxed_and_put_back(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, bindings = opened(
        monkeypatch, cuThreadExchangeStreamCaptureMode=(SUCCESS, "before"), cuMemFree=(FAILURE,)
    )
    with pytest.raises(DriverError):
        driver.free(4096)
    names = [name for name, _ in bindings.calls[-3:]]
    assert names == ["cuThreadExchangeStreamCaptureMode", "cuMemFree", "cuThreadExchangeStreamCaptureMode"]
    assert bindings.calls[-1][1] == ("before",)


def test_launch_structs_have_the_drivers_layout() -> None:
    assert ctypes.sizeof(_LaunchConfig) == 56
    assert (_LaunchConfig.stream.offset, _LaunchConfig.attributes.offset) == (32, 40)
    assert _LaunchConfig.num_attributes.offset == 48
    assert ctypes.sizeof(_LaunchAttribute) == 72
    assert _LaunchAttribute.value.offset == 8
    kind = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert int(kind) == _driver._PROGRAMMATIC_STREAM_SERIALIZATION


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_launch_carries_its_shape(
    programmatic: bool, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Params(ctypes.Structure):
        _fields_ = (("value", ctypes.c_int),)

    driver, _ = opened(monkeypatch)
    params = Params(5)
    launch = driver.launcher(99, (4, 2, 1), (128, 1, 1), 1024, (params,), programmatic=programmatic)
    launch(7)
    params.value = 6
    launch(8)
    (first, function, pointers), (second, _, _) = library.launched
    assert (function, first.shared_bytes, first.stream, second.stream) == (99, 1024, 7, 8)
    assert (tuple(first.grid), tuple(first.block)) == ((4, 2, 1), (128, 1, 1))
    assert first.num_attributes == int(programmatic)
    # The driver follows the pointer at the moment of the launch.
    address = ctypes.c_void_p.from_address(pointers).value
    assert address == ctypes.addressof(params)
    library.status = int(FAILURE)
    with pytest.raises(DriverError, match="cuLaunchKernelEx"):
        launch(7)


def test_device_facts_are_read(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, bindings = opened(
        monkeypatch,
        cuDeviceGet=(SUCCESS, 0),
        cuDeviceGetAttribute=(SUCCESS, 8),
        cuDeviceGetName=(SUCCESS, b"GPU\0\0\0"),
        cuCtxGetCurrent=(SUCCESS, 0),
        cuDevicePrimaryCtxRetain=(SUCCESS, 77),
    )
    properties = driver.properties(0)
    assert (properties.name, properties.capability) == ("GPU", (8, 8))
    assert properties.bandwidth == 2.0 * 8e3 * 8 / 8
    assert driver.current_device() is None
    assert driver.retain_context(0) == 77
    bindings.answers |= {"cuCtxGetCurrent": (SUCCESS, 77), "cuCtxGetDevice": (SUCCESS, 3)}
    assert driver.current_device() == 3
    assert driver.is_capturing(7)


def test_every_other_call_reaches_the_bindings(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dict.fromkeys(
        (
            "cuMemAlloc",
            "cuMemHostAlloc",
            "cuStreamCreate",
            "cuEventCreate",
            "cuModuleLoadData",
            "cuModuleGetFunction",
            "cuStreamEndCapture",
            "cuGraphInstantiate",
        ),
        (SUCCESS, 11),
    )
    driver, bindings = opened(monkeypatch, **made)
    assert (
        driver.allocate(8)
        == driver.allocate_pinned(8)
        == driver.create_stream()
        == driver.create_event()
        == 11
    )
    assert driver.load_module(b"code") == driver.get_function(11, "k") == 11
    assert driver.end_capture(7) == driver.instantiate(11) == 11
    driver.begin_capture(7)
    driver.upload_graph(11, 7)
    driver.destroy_graph(11)
    driver.destroy_executable(11)
    driver.allow_shared(11, 1024)
    driver.fill(1, 0xFF, 8, 7)
    driver.copy_to_host(1, 2, 8, 7)
    driver.record_event(11, 7)
    driver.wait_event(11)
    driver.destroy_event(11)
    driver.synchronize(7)
    driver.destroy_stream(7)
    driver.free_pinned(11)
    called = {name for name, _ in bindings.calls}
    assert {
        "cuFuncLoad",
        "cuFuncSetAttribute",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
        "cuGraphUpload",
    } <= called
    (mode,) = [arguments[1] for name, arguments in bindings.calls if name == "cuStreamBeginCapture"]
    assert mode == real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


@pytest.mark.parametrize("ordinal", ["cuda:0", 1.0, True, -1, 1])
def test_a_device_is_named_by_its_ordinal(ordinal: Any, driver: FakeDriver) -> None:
    with pytest.raises(ArgumentMismatch) as caught:
        Device(driver, ordinal)
    assert (caught.value.subject, caught.value.got) == ("device", ordinal)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(devices=2)
    monkeypatch.setattr(_driver, "_driver", driver)
    return driver


def test_no_device_means_the_current_one_or_the_first(two_gpus: FakeDriver) -> None:
    assert resolve_device().ordinal == 0
    with resolve_device(1) as second:
        assert resolve_device() is second
    assert resolve_device(1) is second


@pytest.mark.parametrize("ordinal", [2, "cuda:1"])
def test_a_gpu_that_is_not_there_is_remembered_nowhere(ordinal: Any, two_gpus: FakeDriver) -> None:
    for _ in range(2):
        with pytest.raises(ArgumentMismatch, match="from 0 to 1"):
            resolve_device(ordinal)


def test_a_stream_can_be_waited_for(two_gpus: FakeDriver) -> None:
    Stream(1).synchronize()
    assert two_gpus.calls["synchronize"] == 1
    assert two_gpus.contexts == []
