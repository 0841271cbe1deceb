"""DLPack in both directions, on the C structure itself.

Reading costs a few microseconds and needs no other library; an imported capsule is not consumed but kept,
so its producer frees the memory when we let go of it. An exported array lives until its consumer calls the
deleter.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Imported(NamedTuple):
    """What a capsule says.

    Attributes:
        pointer: Address of the first element.
        shape: Extents.
        strides: Steps in elements, or None for row-major.
        kind: DLPack (code, bits); lanes are folded into the bits.
        device: DLPack (device type, number).
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    kind: tuple[int, int]
    device: tuple[int, int]


_api = ctypes.pythonapi
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
# A capsule in its destructor has no references left; as a py_object it would come back to life.
_peek = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)


def read_capsule(capsule: object) -> Imported:
    """Return what an unversioned, unconsumed capsule describes; the caller keeps the capsule."""
    tensor = _Managed.from_address(_get_pointer(capsule, _NAME)).tensor
    extents = tuple(tensor.shape[: tensor.ndim])
    return Imported(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=extents,
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        kind=(tensor.code, tensor.bits * tensor.lanes),
        device=(tensor.device_type, tensor.device_id),
    )


# Address of each exported structure -> what must outlive its consumer.
_exports: dict[int, tuple[object, ...]] = {}


def _delete(managed: int) -> None:
    _exports.pop(managed, None)


def _drop_capsule(capsule: int) -> None:
    if _is_valid(capsule, _NAME):  # a consumer renames what it takes over
        _exports.pop(_peek(capsule, _NAME), None)


# C calls these; consumers may call the first from a thread without the interpreter lock.
_c_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_c_drop_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop_capsule)


def export_capsule(
    owner: object,
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    kind: tuple[int, int],
    ordinal: int,
) -> object:
    """Return a capsule over memory that `owner` keeps alive."""
    extents, steps = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))(*strides)
    managed = _Managed()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_id = pointer, CUDA_DEVICES[0], ordinal
    tensor.ndim, tensor.lanes, (tensor.code, tensor.bits) = len(shape), 1, kind
    tensor.shape = ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_c_delete, ctypes.c_void_p)
    address = ctypes.addressof(managed)
    _exports[address] = (managed, extents, steps, owner)
    return _new(address, _NAME, ctypes.cast(_c_drop_capsule, ctypes.c_void_p))
