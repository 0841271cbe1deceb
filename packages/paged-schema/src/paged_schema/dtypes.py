"""Element types under their ONNX names, and the short names people type."""

from __future__ import annotations

UNDEFINED = "undefined"

# The numbers are those of onnx.TensorProto.DataType.
ONNX_NUMBER: dict[str, int] = {
    UNDEFINED: 0,
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "string": 8,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "complex64": 14,
    "complex128": 15,
    "bfloat16": 16,
    "float8e4m3fn": 17,
    "float8e4m3fnuz": 18,
    "float8e5m2": 19,
    "float8e5m2fnuz": 20,
    "uint4": 21,
    "int4": 22,
    "float4e2m1": 23,
    "float8e8m0": 24,
    "uint2": 25,
    "int2": 26,
}
NAME_OF_NUMBER: dict[int, str] = {number: name for name, number in ONNX_NUMBER.items()}

ALIASES: dict[str, str] = {
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
    "fp8": "float8e4m3fn",
    "f8e4m3": "float8e4m3fn",
    "float8_e4m3fn": "float8e4m3fn",
    "f8e5m2": "float8e5m2",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "?": UNDEFINED,
}

ITEM_BYTES: dict[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int8": 1,
    "uint8": 1,
    "float8e4m3fn": 1,
    "int32": 4,
}


def canonical(name: str) -> str | None:
    """Return the ONNX name for a name or alias in any case, or None when there is no such type.

    >>> canonical("BF16"), canonical("fp8"), canonical("quaternion")
    ('bfloat16', 'float8e4m3fn', None)
    """
    lowered = name.lower()
    lowered = ALIASES.get(lowered, lowered)
    return lowered if lowered in ONNX_NUMBER else None
