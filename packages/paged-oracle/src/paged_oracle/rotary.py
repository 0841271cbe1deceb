"""Rotary position embedding, with the roundings that ONNX Runtime's CUDA kernels make.

Invariant: channels outside ``[offset, offset + rotary_dim)`` keep their bits.

The pair ``(x1, x2)`` at angle ``a`` becomes ``(x1 cos a - x2 sin a, x2 cos a + x1 sin a)``. ONNX Runtime
computes it in the tensor's own type T, not in float32 (seen on 1.31.1 in every rotated key of the golden
files, bit for bit):

* bfloat16: both products and their sum are each rounded to T.
* float16: the sine product is rounded to T; the cosine product is fused with the sum, which is rounded once.
* float32 (ONNX Runtime has no such kernel; our extension): the bfloat16 sequence in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paged_oracle.dtypes import Array, Float64, round_to, upcast

_Turn = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def rotate(heads: Array, cos: Array, sin: Array, *, offset: int = 0, interleaved: bool = False) -> Array:
    """Rotate in the type of `heads`, rounding as ONNX Runtime does.

    Args:
        heads: (tokens, heads, head_size) in T.
        cos: (tokens, rotary_dim / 2) in T, the table's row at each token's position.
        sin: like `cos`.
        offset: first rotated channel.
        interleaved: pair channels (2i, 2i + 1) instead of (i, i + rotary_dim / 2).

    Returns:
        A new array like `heads`.
    """
    turn = _turn_fused if heads.dtype == np.float16 else _turn_stepwise
    return _apply(turn, heads, cos, sin, offset, interleaved)


def rotate_exact(
    heads: Float64, cos: Array, sin: Array, *, offset: int = 0, interleaved: bool = False
) -> Float64:
    """Rotate in float64 with no rounding to T; arguments as in `rotate`, `heads` in float64."""
    return upcast(_apply(_turn_exact, heads, upcast(cos), upcast(sin), offset, interleaved))


def _apply(turn: _Turn, heads: Array, cos: Array, sin: Array, offset: int, interleaved: bool) -> Array:
    half = cos.shape[1]
    stop = offset + 2 * half
    if interleaved:
        first, second = slice(offset, stop, 2), slice(offset + 1, stop, 2)
    else:
        first, second = slice(offset, offset + half), slice(offset + half, stop)
    rotated = heads.copy()
    pair = turn(heads[..., first], heads[..., second], cos[:, None], sin[:, None])
    rotated[..., first], rotated[..., second] = pair
    return rotated


def _turn_stepwise(x1: Array, x2: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    # Products of two bfloat16 are exact in float32, so each cast below is the only rounding of its step.
    dtype = x1.dtype
    a, b, c, s = (part.astype(np.float32) for part in (x1, x2, cos, sin))

    def step(value: Array) -> Array:
        return value.astype(dtype).astype(np.float32)

    return (step(a * c) - step(b * s)).astype(dtype), (step(b * c) + step(a * s)).astype(dtype)


def _turn_fused(x1: Array, x2: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    # A product of two float16 is exact in float64; so is, but for extreme exponents, its sum with a float16.
    a, b, c, s = (upcast(part) for part in (x1, x2, cos, sin))

    def sine(value: Float64) -> Float64:
        return upcast(round_to(value * s, x1.dtype))

    return round_to(a * c - sine(b), x1.dtype), round_to(b * c + sine(a), x1.dtype)


def _turn_exact(x1: Array, x2: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    a, b, c, s = (upcast(part) for part in (x1, x2, cos, sin))
    return a * c - b * s, b * c + a * s
