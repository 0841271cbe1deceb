"""The state of a GPU as its management library tells it: load, other processes, MIG, clocks, power.

Every probe is guarded: what cannot be asked is None. The library is opened by `ctypes`, so nothing need be
installed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paged_bench.record import Gpu

T = TypeVar("T")
_THROTTLE = {
    0x4: "sw power cap",
    0x8: "hw slowdown",
    0x20: "sw thermal slowdown",
    0x40: "hw thermal slowdown",
    0x80: "hw power brake",
}
_SM, _MEMORY = 1, 2
_MOST_PROCESSES = 256


@dataclass(frozen=True)
class GpuState:
    """One look at a GPU; None is what the library does not say.

    Attributes:
        utilization: Per cent of the last sample period in which a kernel ran.
        processes: Ids of processes that compute on it. In a container they can be ids of the host.
        mig: Whether it is cut into slices.
    """

    utilization: int | None = None
    processes: frozenset[int] | None = None
    mig: bool | None = None
    driver_release: str | None = None
    ecc: bool | None = None
    persistence: bool | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] | None = None


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    )


class Nvml:
    """The library, opened once. Without it every state is empty."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
        try:
            library = ctypes.CDLL(name)
            if library.nvmlInit_v2() == 0:
                self._library = library
        except (OSError, AttributeError):
            self._library = None

    def state(self, uuid: str | None = None) -> GpuState:
        """Look at the GPU of a UUID (hexadecimal digits), or at the first one."""
        library = self._library
        if library is None:
            return GpuState()
        handle = self._handle(library, uuid)
        if handle is None:
            # What CUDA counts as a GPU is a slice where the library knows its UUID as one.
            slice_of = None if uuid is None else self._handle(library, uuid, "MIG")
            return GpuState() if slice_of is None else GpuState(mig=True)
        ask = _Asker(library, handle)
        return GpuState(
            utilization=_guarded(ask.utilization),
            processes=_guarded(ask.processes),
            mig=_guarded(lambda: ask.pair("nvmlDeviceGetMigMode")),
            driver_release=_guarded(ask.release),
            ecc=_guarded(lambda: ask.pair("nvmlDeviceGetEccMode")),
            persistence=_guarded(lambda: bool(ask.number("nvmlDeviceGetPersistenceMode"))),
            power_limit_w=_guarded(lambda: ask.number("nvmlDeviceGetPowerManagementLimit") / 1e3),
            sm_clock_mhz=_guarded(lambda: float(ask.number("nvmlDeviceGetClockInfo", _SM))),
            memory_clock_mhz=_guarded(lambda: float(ask.number("nvmlDeviceGetClockInfo", _MEMORY))),
            temperature_c=_guarded(lambda: float(ask.number("nvmlDeviceGetTemperature", 0))),
            throttle=_guarded(ask.throttle),
        )

    @staticmethod
    def _handle(library: ctypes.CDLL, uuid: str | None, kind: str = "GPU") -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        if uuid is None:
            status = library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        else:
            text = "-".join((kind, uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
            status = library.nvmlDeviceGetHandleByUUID(text.encode(), ctypes.byref(handle))
        return handle if status == 0 else None


class _Asker:
    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def _ask(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(self._handle, *arguments)
        if status != 0:
            raise LookupError(name)

    def number(self, name: str, *before: int) -> int:
        value = ctypes.c_uint()
        self._ask(name, *before, ctypes.byref(value))
        return value.value

    def pair(self, name: str) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        self._ask(name, ctypes.byref(current), ctypes.byref(pending))
        return current.value == 1

    def utilization(self) -> int:
        value = _Utilization()
        self._ask("nvmlDeviceGetUtilizationRates", ctypes.byref(value))
        return int(value.gpu)

    def processes(self) -> frozenset[int]:
        count, rows = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        self._ask("nvmlDeviceGetComputeRunningProcesses_v3", ctypes.byref(count), rows)
        return frozenset(int(row.pid) for row in rows[: count.value])

    def release(self) -> str:
        text = ctypes.create_string_buffer(96)
        if self._library.nvmlSystemGetDriverVersion(text, 96) != 0:
            raise LookupError("nvmlSystemGetDriverVersion")
        return text.value.decode()

    def throttle(self) -> tuple[str, ...]:
        reasons = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.byref(reasons))
        return tuple(name for bit, name in _THROTTLE.items() if reasons.value & bit)


def _guarded(probe: Callable[[], T]) -> T | None:
    try:
        return probe()
    except (LookupError, AttributeError):  # the library refuses, or is too old to have the function
        return None


def with_states(gpu: Gpu, before: GpuState, after: GpuState, others: int | None) -> Gpu:
    """Return the record's block with what two looks told."""

    def both(name: str) -> tuple[float, float] | None:
        pair = (getattr(before, name), getattr(after, name))
        return None if None in pair else pair

    seen = None if after.throttle is None else tuple(sorted({*(before.throttle or ()), *after.throttle}))
    return gpu.model_copy(
        update={
            "driver_release": after.driver_release,
            "ecc": after.ecc,
            "mig": after.mig,
            "persistence": after.persistence,
            "power_limit_w": after.power_limit_w,
            "sm_clock_mhz": both("sm_clock_mhz"),
            "memory_clock_mhz": both("memory_clock_mhz"),
            "temperature_c": both("temperature_c"),
            "throttle_reasons": seen,
            "other_processes": others,
        }
    )
