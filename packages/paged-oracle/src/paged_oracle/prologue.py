"""What happens to query, key and value before attention: unpack, normalise, rotate.

Invariant: nothing here touches a cache. With ``"ort"`` every result is in T, as ONNX Runtime's kernels leave
it; with ``"exact"`` the queries and keys are float64 and have not been rounded at all.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from paged_oracle.dtypes import Array, Int64, upcast
from paged_oracle.normalization import rms_norm, rms_norm_exact
from paged_oracle.resolve import BoundCall
from paged_oracle.rotary import rotate, rotate_exact

Rounding = Literal["ort", "exact"]


def project(bound: BoundCall, positions: Int64, rounding: Rounding) -> tuple[Array, Array, Array | None]:
    """Return the query heads, the key rows to cache and the value rows to cache.

    Args:
        bound: the call and its arrays.
        positions: (tokens,) absolute position of each token.
        rounding: which arithmetic.

    Returns:
        Queries (tokens, num_heads, head_size), keys (tokens, kv_num_heads, head_size) and, unless the layout
        is LATENT, values (tokens, kv_num_heads, head_size). The values are never rotated, normalised or
        rounded.
    """
    call, arrays = bound.call, bound.arrays
    query, key, value = _split(bound)
    if rounding == "exact":
        query, key = upcast(query), upcast(key)
    if call.has_qk_norm:
        query = _normalise(query, arrays["q_norm_weight"], call.qk_norm_epsilon)
        key = _normalise(key, arrays["k_norm_weight"], call.qk_norm_epsilon)
    if call.rotary and bound.rotary_rows > 0:
        cos, sin = (arrays[name][positions] for name in ("cos_cache", "sin_cache"))
        query, key = (_rotate(bound, heads, cos, sin) for heads in (query, key))
    return query, key, value


def _split(bound: BoundCall) -> tuple[Array, Array, Array | None]:
    call, arrays, size = bound.call, bound.arrays, bound.head_size
    query = arrays["query"]
    tokens = query.shape[0]
    if call.mode == "packed":
        heads = query.reshape(tokens, call.num_heads + 2 * call.kv_num_heads, size)
        query, key, value = np.split(heads, [call.num_heads, call.num_heads + call.kv_num_heads], axis=1)
        return query, key, value
    query = query.reshape(tokens, call.num_heads, size)
    key = arrays["key"].reshape(tokens, call.kv_num_heads, size)
    if call.mode == "latent":
        return query, key, None
    return query, key, arrays["value"].reshape(tokens, call.kv_num_heads, size)


def _normalise(heads: Array, weight: Array, epsilon: float) -> Array:
    if heads.dtype == np.float64:
        return rms_norm_exact(upcast(heads), weight, epsilon)
    return rms_norm(heads, weight, epsilon)


def _rotate(bound: BoundCall, heads: Array, cos: Array, sin: Array) -> Array:
    offset, interleaved = bound.call.rotary_offset, bound.call.rotary_interleaved
    if heads.dtype == np.float64:
        return rotate_exact(upcast(heads), cos, sin, offset=offset, interleaved=interleaved)
    return rotate(heads, cos, sin, offset=offset, interleaved=interleaved)
