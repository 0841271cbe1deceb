"""Device arrays: our own small one, and a view of anybody else's.

Nothing here copies or synchronises behind the caller's back. Memory in the host is refused, as a kernel
that read it would fail much later. `DeviceArray.from_pointer` wraps a raw address or a `cuda.core` buffer.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paged_cuda.device import DeviceLike, DeviceMemory, resolve_device
from paged_cuda.dlpack import export_capsule
from paged_cuda.dtypes import dtype_of, numpy_dtype
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.stream import StreamLike, stream_handle

Shape = tuple[int, ...]
Geometry = tuple[Shape, Shape, str, int]
_serials = itertools.count(1)


class BufferLike(Protocol):
    """A `cuda.core` buffer, or what looks like one."""

    @property
    def handle(self) -> Any:
        """The address, or what converts to it."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...


def _extents(shape: Sequence[int]) -> Shape:
    try:
        extents = tuple(operator.index(extent) for extent in shape)
    except TypeError:
        extents = (-1,)
    if any(extent < 0 for extent in extents):
        raise ArgumentMismatch("shape", "shape", repr(shape), "a sequence of integers, none negative")
    return extents


def contiguous_strides(shape: Shape) -> Shape:
    """Return row-major strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class DeviceArray:
    """An n-dimensional array on a GPU.

    Attributes:
        pointer: Address of the first element.
        shape: Extents.
        strides: Steps in elements.
        dtype: ONNX type name.
        ordinal: The GPU's number.
        owner: Kept alive with the array.
        geometry: All but pointer and owner, as one value to compare; an array never changes.
        serial: A number that no other array of the process has, even after this one is gone.
    """

    __slots__ = ("dtype", "geometry", "ordinal", "owner", "pointer", "serial", "shape", "strides")

    def __init__(
        self, pointer: int, shape: Shape, strides: Shape, dtype: str, ordinal: int, owner: object = None
    ) -> None:
        self.pointer = pointer
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.ordinal = ordinal
        self.owner = owner
        self.geometry: Geometry = (shape, strides, dtype, ordinal)
        self.serial = next(_serials)

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: str, device: DeviceLike = None) -> DeviceArray:
        """Allocate without initialising.

        Raises:
            ArgumentMismatch: The shape or the type is not one of an array.
            NoDriver: There is no usable GPU.
            DriverError: The GPU is out of memory.
        """
        where, extents = resolve_device(device), _extents(shape)
        memory = DeviceMemory(where, math.prod(extents) * dtype_of(dtype).itemsize)
        return cls(memory.pointer, extents, contiguous_strides(extents), dtype, where.ordinal, memory)

    @classmethod
    def from_numpy(
        cls,
        array: npt.NDArray[Any],
        stream: StreamLike,
        device: DeviceLike = None,
        *,
        dtype: str | None = None,
    ) -> DeviceArray:
        """Copy a host array to the GPU; it may be changed as soon as this returns.

        Args:
            array: The source; `dtype="bfloat16"` reads uint16 as raw bits.
            stream: Where the copy is queued.
            device: The target GPU.
            dtype: ONNX type name where NumPy's own is not it.
        """
        # The type's name does not tell its byte order.
        host = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        target = cls.empty(array.shape, dtype or host.dtype.name, device)
        if host.nbytes != math.prod(target.shape) * dtype_of(target.dtype).itemsize:
            raise ArgumentMismatch(
                "dtype", "from_numpy", host.dtype.name, f"elements as wide as {target.dtype}"
            )
        where, handle = resolve_device(device), stream_handle(stream)
        if host.nbytes:
            with where:
                where.driver.copy_to_device(target.pointer, host.ctypes.data, host.nbytes, handle)
                where.driver.synchronize(handle)
        return target

    @classmethod
    def from_pointer(
        cls,
        pointer: int | BufferLike,
        shape: Sequence[int],
        dtype: str,
        device: DeviceLike = None,
        *,
        strides: Sequence[int] | None = None,
    ) -> DeviceArray:
        """Wrap an address, or a buffer that is then kept alive. Strides count elements.

        Raises:
            ArgumentMismatch: An array of that shape does not fit the buffer, or shape, strides or type are
                not those of an array.
        """
        extents, itemsize = _extents(shape), dtype_of(dtype).itemsize
        steps = contiguous_strides(extents) if strides is None else tuple(map(operator.index, strides))
        if len(steps) != len(extents):
            raise ArgumentMismatch("strides", "strides", steps, f"one for each of {len(extents)} dimensions")
        ordinal = resolve_device(device).ordinal
        if isinstance(pointer, int):
            return cls(pointer, extents, steps, dtype, ordinal)
        last = sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
        needed = (last + 1) * itemsize if math.prod(extents) else 0
        if needed > pointer.size:
            raise ArgumentMismatch(
                "extent", "buffer", f"{pointer.size} bytes", f"at least {needed} for {extents}"
            )
        return cls(int(pointer.handle), extents, steps, dtype, ordinal, pointer)

    def to_numpy(self, stream: StreamLike, *, raw: bool = False) -> npt.NDArray[Any]:
        """Copy to the host and wait for it.

        Args:
            stream: Where the copy is queued; work queued there before is done first.
            raw: Return bfloat16 as uint16 bits, which needs no `ml_dtypes`.

        Raises:
            ArgumentMismatch: The array is not contiguous.
        """
        if self.strides != contiguous_strides(self.shape):
            raise ArgumentMismatch("strides", "to_numpy", self.strides, "a contiguous array")
        host = np.empty(self.shape, numpy_dtype("uint16" if raw and self.dtype == "bfloat16" else self.dtype))
        where = self.owner.device if isinstance(self.owner, DeviceMemory) else resolve_device(self.ordinal)
        handle = stream_handle(stream)
        if host.nbytes:
            with where:
                where.driver.copy_to_host(host.ctypes.data, self.pointer, host.nbytes, handle)
                where.driver.synchronize(handle)
        return host

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps between them not counted."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        kind = dtype_of(self.dtype)
        return {
            "shape": self.shape,
            "strides": tuple(step * kind.itemsize for step in self.strides),
            "typestr": kind.typestr,
            "data": (self.pointer, False),
            "version": 3,
            "stream": None,
        }

    def __dlpack__(self, *, stream: int | None = None, **_newer: object) -> object:
        return export_capsule(
            self, self.pointer, self.shape, self.strides, dtype_of(self.dtype).dlpack, self.ordinal
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.ordinal)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype!r}, device={self.ordinal})"
