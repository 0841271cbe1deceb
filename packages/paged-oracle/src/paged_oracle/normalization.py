"""RMSNorm of query and key heads, applied before the rotary embedding.

Invariant: one weight vector of head_size serves all heads; each (token, head) is normalised on its own.
"""

from __future__ import annotations

import numpy as np

from paged_oracle.dtypes import Array, Float32, Float64, round_to, upcast


def rms_norm(heads: Array, weight: Array, epsilon: float) -> Array:
    """Normalise in float32 and round once to T: ``x / sqrt(mean(x^2) + epsilon) * weight``.

    The squares are summed in a tree over the next power of two (at least 32) lanes, as ONNX Runtime's kernel
    does. Its reciprocal square root is the GPU's fast one; ours is correctly rounded, which differs by at
    most two units of float32 and so almost never after rounding to 16 bits.

    Args:
        heads: (tokens, heads, head_size) in T.
        weight: (head_size,) in T.
        epsilon: added to the mean square, as float32.

    Returns:
        A new array like `heads`.
    """
    values = heads.astype(np.float32)
    mean = _tree_sum(values * values) / np.float32(heads.shape[-1])
    inverse = (1.0 / np.sqrt((mean + np.float32(epsilon)).astype(np.float64))).astype(np.float32)
    return round_to(values * inverse[..., None] * weight.astype(np.float32), heads.dtype)


def rms_norm_exact(heads: Float64, weight: Array, epsilon: float) -> Float64:
    """Normalise in float64 with no rounding; arguments as in `rms_norm`, `heads` in float64."""
    mean = np.mean(heads * heads, axis=-1, keepdims=True)
    normalised: Float64 = heads / np.sqrt(mean + epsilon) * upcast(weight)
    return normalised


def _tree_sum(squares: Float32) -> Float32:
    width = squares.shape[-1]
    lanes = max(32, 1 << max(width - 1, 0).bit_length())
    level = np.zeros((*squares.shape[:-1], lanes), np.float32)
    level[..., :width] = squares
    while level.shape[-1] > 1:
        half = level.shape[-1] // 2
        level = level[..., :half] + level[..., half:]
    return level[..., 0]
