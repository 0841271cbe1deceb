"""One plain view of every array that a caller may hand in.

Our own arrays and tensors with torch's accessors are read directly, the rest by DLPack, then by the CUDA
array interface. No producer is asked to synchronise: the caller orders the streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_cuda.arrays import DeviceArray, Shape, contiguous_strides
from paged_cuda.dlpack import CUDA_DEVICES, read_capsule
from paged_cuda.dtypes import BY_DLPACK, BY_TYPESTR, dtype_of
from paged_cuda.errors import ArgumentMismatch

_ON_DEVICE = "an array on the GPU: copy it with DeviceArray.from_numpy, or pass a GPU tensor"


def device_view(array: object, name: str) -> DeviceArray:
    """Return `array` as a `DeviceArray` over the same memory.

    Args:
        array: A `DeviceArray`, or an object with torch's accessors, DLPack or the CUDA array interface.
        name: The argument's name, for messages.

    Raises:
        ArgumentMismatch: It lies in host memory, its type is unknown, or it is no array at all.
    """
    if type(array) is DeviceArray:
        return array
    if isinstance(array, np.ndarray | np.generic):
        raise ArgumentMismatch("host-memory", name, "a NumPy array", _ON_DEVICE)
    if hasattr(array, "data_ptr") and hasattr(array, "is_cuda"):
        return _from_torch(array, name)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array, name)
    if hasattr(array, "__cuda_array_interface__"):
        return _from_interface(array, name)
    wanted = (
        "a GPU array with DLPack or __cuda_array_interface__; wrap an address with DeviceArray.from_pointer"
    )
    raise ArgumentMismatch("array", name, type(array).__name__, wanted)


def _from_torch(tensor: Any, name: str) -> DeviceArray:
    if not tensor.is_cuda:
        raise ArgumentMismatch("host-memory", name, f"a tensor on {tensor.device}", _ON_DEVICE)
    dtype = str(tensor.dtype).rpartition(".")[2]
    return DeviceArray(
        tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), dtype, tensor.get_device(), tensor
    )


def _from_dlpack(array: Any, name: str) -> DeviceArray:
    kind, _ = array.__dlpack_device__()
    if int(kind) not in CUDA_DEVICES:
        raise ArgumentMismatch("host-memory", name, f"DLPack device type {int(kind)}", _ON_DEVICE)
    # -1 asks not to synchronise; JAX takes it for a stream's handle.
    jax = type(array).__module__.partition(".")[0] in ("jax", "jaxlib")
    capsule = array.__dlpack__(stream=None if jax else -1)
    read = read_capsule(capsule)
    dtype = BY_DLPACK.get(read.kind)
    if dtype is None:
        raise ArgumentMismatch(
            "dtype", name, f"DLPack type code and bits {read.kind}", "a type the call can have"
        )
    strides = contiguous_strides(read.shape) if read.strides is None else read.strides
    return DeviceArray(read.pointer, read.shape, strides, dtype, read.device[1], (array, capsule))


def _from_interface(array: Any, name: str) -> DeviceArray:
    interface = array.__cuda_array_interface__
    dtype = BY_TYPESTR.get(interface["typestr"])
    if dtype is None:
        raise ArgumentMismatch("dtype", name, interface["typestr"], "a type the call can have")
    shape: Shape = tuple(interface["shape"])
    steps, itemsize = interface.get("strides"), dtype_of(dtype).itemsize
    if steps is not None and any(step % itemsize for step in steps):
        raise ArgumentMismatch("strides", name, f"{tuple(steps)} bytes", f"multiples of {itemsize}")
    strides = contiguous_strides(shape) if steps is None else tuple(step // itemsize for step in steps)
    # The interface does not say which GPU; the driver's unified addresses make the pointer enough.
    return DeviceArray(interface["data"][0], shape, strides, dtype, UNKNOWN_DEVICE, array)


UNKNOWN_DEVICE = -1
