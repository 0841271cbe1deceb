"""Codecs between attention's numbers and what a cache stores.

Invariant: `encode` sees values after norm and rotary; whatever it stores is what attention reads back, in the
same call too. A scale of 0 stores what decodes to 0.

The formulas are those of ONNX Runtime's write kernels, in float32. int8 and float8e4m3fn: multiply by the
reciprocal of the scale, itself rounded to float32, then round half to even. INT4: divide by the scale, clamp,
then round. ``"exact"`` divides in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from paged_oracle.dtypes import FLOAT8, Array, DType, Float32, Float64, round_to, upcast

FLOAT8_MAX = 448.0


@dataclass(frozen=True, eq=False)
class Codec:
    """How one cache stores its rows.

    Attributes:
        dtype: element type of the cache.
        scale: (kv_num_heads, head_size) float32, or None for a cache that is not quantised.
        int4: two codes to a byte, the even channel in the low nibble, each code plus 8.
        copy_dtype: the type that dequantised values are rounded to, or None to keep them exact.
    """

    dtype: DType
    scale: Float32 | None = None
    int4: bool = False
    copy_dtype: DType | None = None

    def encode(self, values: Array) -> Array:
        """Return stored rows for new tokens.

        Args:
            values: (tokens, kv_num_heads, head_size), in T or (for ``"exact"``) float64.

        Returns:
            (tokens, kv_num_heads, stored width) in the cache's type.
        """
        if self.scale is None:
            return round_to(values, self.dtype) if values.dtype == np.float64 else values.astype(self.dtype)
        scaled = self._scaled(values, self.scale)
        if self.int4:
            return _pack(np.rint(np.clip(np.nan_to_num(scaled, nan=-8.0), -8, 7)))
        if self.dtype == FLOAT8:
            return round_to(np.clip(np.nan_to_num(scaled, nan=FLOAT8_MAX), -FLOAT8_MAX, FLOAT8_MAX), FLOAT8)
        codes: Array = np.clip(np.rint(np.nan_to_num(scaled, nan=0.0)), -128, 127).astype(np.int8)
        return codes

    def _scaled(self, values: Array, scale: Float32) -> Float64 | Float32:
        if values.dtype == np.float64:
            return _quotient(upcast(values), upcast(scale))
        wide = values.astype(np.float32)
        return _quotient(wide, scale) if self.int4 else wide * _quotient(np.ones_like(scale), scale)

    def decode(self, rows: Array, out: Float64) -> None:
        """Put the values of stored rows into `out`; exact, as a code times a float32 scale fits float64.

        Args:
            rows: (tokens, kv_num_heads, stored width) in the cache's type.
            out: (tokens, kv_num_heads, head_size) float64.
        """
        out[...] = _unpack(rows) if self.int4 else rows
        if self.scale is not None:
            out *= self.scale
            if self.copy_dtype is not None:
                out[...] = round_to(out, self.copy_dtype)


def expand_scale(scale: Array, kv_num_heads: int, head_size: int) -> Float32:
    """Broadcast a per-tensor or per-channel scale to (kv_num_heads, head_size) float32."""
    flat = scale.astype(np.float32).reshape(-1)
    shape = (kv_num_heads, head_size)
    return np.broadcast_to(flat, shape) if flat.size == 1 else flat.reshape(shape)


_Float = TypeVar("_Float", Float32, Float64)


def _quotient(numerator: _Float, scale: _Float) -> _Float:
    """Divide, with 0 where the scale is 0."""
    zeros = np.zeros(np.broadcast_shapes(numerator.shape, scale.shape), numerator.dtype)
    return np.divide(numerator, scale, out=zeros, where=scale != 0)


def _pack(codes: Array) -> Array:
    nibbles = (codes + 8).astype(np.uint8)
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.full((*nibbles.shape[:-1], 1), 8, np.uint8)], axis=-1)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4)


def _unpack(rows: Array) -> Array:
    nibbles = np.stack([rows & np.uint8(15), rows >> np.uint8(4)], axis=-1)
    return nibbles.reshape(*rows.shape[:-1], -1).astype(np.int8) - np.int8(8)
