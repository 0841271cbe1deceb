"""A GPU as the rest of the package sees it: a driver, an ordinal and its primary context.

The primary context is the one that torch, CuPy and JAX use, so pointers and streams are common property.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from types import TracebackType

from paged_cuda._driver import DeviceProperties, Driver, require_driver
from paged_cuda.errors import ArgumentMismatch, DriverError


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """One GPU. As a context manager it makes its primary context current in the block.

    Attributes:
        driver: Who carries out the calls.
        ordinal: The GPU's number.
        properties: What the host side decides by.
    """

    driver: Driver
    ordinal: int
    properties: DeviceProperties = field(init=False)
    context: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        count = self.driver.device_count()
        if type(self.ordinal) is not int or not 0 <= self.ordinal < count:
            raise ArgumentMismatch("device", "device", self.ordinal, f"an ordinal from 0 to {count - 1}")
        object.__setattr__(self, "properties", self.driver.properties(self.ordinal))
        object.__setattr__(self, "context", self.driver.retain_context(self.ordinal))

    def __enter__(self) -> Device:
        self.driver.push_context(self.context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.driver.pop_context()


DeviceLike = Device | int | None
_devices: dict[tuple[int, int], Device] = {}


def resolve_device(device: DeviceLike = None) -> Device:
    """Return the GPU meant by an ordinal, or by None: the thread's current one, else number 0.

    Raises:
        NoDriver: There is no usable driver or GPU.
        ArgumentMismatch: No GPU has that number.
    """
    if isinstance(device, Device):
        return device
    driver = require_driver()
    ordinal = device if device is not None else driver.current_device() or 0
    key = (id(driver), ordinal)
    if key not in _devices:
        _devices[key] = Device(driver, ordinal)
    return _devices[key]


class DeviceMemory:
    """Bytes on a GPU, freed when the last owner lets go.

    Attributes:
        device: Where they lie.
        pointer: Their address; 0 for no bytes.
        nbytes: How many.
    """

    __slots__ = ("__weakref__", "device", "nbytes", "pointer")

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        with device:
            self.pointer = device.driver.allocate(nbytes) if nbytes else 0
        if self.pointer:
            weakref.finalize(self, _release, device, self.pointer)


def _release(device: Device, pointer: int) -> None:
    # The driver is shutting down, or a failed kernel took the context along: either way the bytes are gone.
    with contextlib.suppress(DriverError), device:
        device.driver.free(pointer)
