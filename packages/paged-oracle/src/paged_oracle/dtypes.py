"""Element types: their schema names, and rounding from float64 that happens once.

Invariant: `round_to` rounds a float64 straight to its target, half to even. A cast of ml_dtypes goes through
float32 and would round twice, which moves values that lie just beside a tie.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

# NumPy's types cannot name ml_dtypes' elements, so an array in T has an element type of Any.
Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
DType = np.dtype[Any]
Bool = npt.NDArray[np.bool_]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

_NUMPY: dict[str, DType] = {
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float32": np.dtype(np.float32),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "float8e4m3fn": FLOAT8,
    "int32": np.dtype(np.int32),
}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}

# Significant digits, the implied one included, and the exponent of the smallest normal number.
DIGITS: dict[DType, tuple[int, int]] = {
    _NUMPY["float16"]: (11, -14),
    BFLOAT16: (8, -126),
    _NUMPY["float32"]: (24, -126),
}


def name_of(dtype: DType) -> str:
    """Return the schema's name of a NumPy type; a type that the schema has no use for keeps NumPy's name."""
    return _NAMES.get(dtype) or str(dtype.name)


def numpy_dtype(name: str) -> DType:
    """Return the NumPy type of a schema type name, such as ``"bfloat16"``."""
    return _NUMPY[name]


def upcast(array: Array) -> Float64:
    """Return the values as float64; exact for every type used here."""
    return array.astype(np.float64)


def round_to(values: Float64 | Float32, dtype: DType) -> Array:
    """Round float64 (or float32) values to `dtype`, once, to nearest with ties to even.

    Args:
        values: any shape.
        dtype: float16, bfloat16, float32 or float8_e4m3fn. The caller keeps float8 values within +-448: the
            type has no infinity, and a larger value becomes NaN.
    """
    if values.dtype == np.float64 and dtype in (BFLOAT16, FLOAT8):
        return _round_to_odd(values).astype(dtype)
    return values.astype(dtype)


def _round_to_odd(values: Float64 | Float32) -> Float32:
    """Round float64 to float32 so that a later rounding to at most 22 bits gives the directly rounded value.

    An inexact result gets an odd last bit: it can then be neither a value nor a tie of the narrower type.
    """
    nearest = values.astype(np.float32)
    inexact = np.isfinite(nearest) & (nearest != values)
    if not inexact.any():
        return nearest
    bits = nearest.view(np.uint32)
    away = inexact & (np.abs(nearest) > np.abs(values))
    return np.where(inexact, (bits - away) | np.uint32(1), bits).astype(np.uint32).view(np.float32)
