"""Element types by their ONNX names, as NumPy, DLPack and the array interface spell them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paged_cuda.errors import ArgumentMismatch


class DType(NamedTuple):
    """One element type.

    Attributes:
        itemsize: Bytes an element.
        typestr: Array-interface spelling; raw bytes where NumPy has no such type.
        dlpack: DLPack (code, bits).
    """

    itemsize: int
    typestr: str
    dlpack: tuple[int, int]


DTYPES: dict[str, DType] = {
    "float16": DType(2, "<f2", (2, 16)),
    "bfloat16": DType(2, "<V2", (4, 16)),
    "float32": DType(4, "<f4", (2, 32)),
    "int8": DType(1, "|i1", (0, 8)),
    "uint8": DType(1, "|u1", (1, 8)),
    "uint16": DType(2, "<u2", (1, 16)),
    "int32": DType(4, "<i4", (0, 32)),
    "int64": DType(8, "<i8", (0, 64)),
}
BY_DLPACK: dict[tuple[int, int], str] = {dtype.dlpack: name for name, dtype in DTYPES.items()}
BY_TYPESTR: dict[str, str] = {dtype.typestr: name for name, dtype in DTYPES.items()} | {"|V2": "bfloat16"}


def dtype_of(name: str) -> DType:
    """Return the element type called `name`.

    Raises:
        ArgumentMismatch: There is no such type here.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise ArgumentMismatch("dtype", "dtype", name, f"one of {', '.join(DTYPES)}") from None


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return NumPy's type for `name`; bfloat16 is the type of `ml_dtypes`.

    Raises:
        ArgumentMismatch: bfloat16 without `ml_dtypes` installed.
    """
    if name != "bfloat16":
        return np.dtype(dtype_of(name).typestr)
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        advice = "pip install ml-dtypes, or ask for the raw bits as uint16"
        raise ArgumentMismatch("dtype", "bfloat16", "NumPy alone", advice) from None
    found: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
    return found
