"""How far two right results may lie apart, each bound with the model of the error behind it.

Invariant: a tolerance is an absolute bound for each value of an output, derived from what is rounded where.
None is fitted to an observed error. Tolerances add up.

Notation: u is the unit roundoff of a type, half its relative spacing: 2^-8 for bfloat16, 2^-11 for float16,
2^-24 for float32. An output value is ``o = sum p v`` with weights p that sum to at most 1; its *magnitude* is
``sum p |v|``.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import numpy as np

from paged_oracle.backends import COMMON
from paged_oracle.dtypes import DIGITS, Array, DType, Float64, upcast
from paged_oracle.forward import Forward
from paged_oracle.resolve import Attributes, Inputs, resolve
from paged_oracle.tiles import tiles

FLOAT32_ROUNDOFF = 2.0**-24
_CACHES = ("key_cache", "value_cache")


def magnitude(
    attributes: Attributes,
    inputs: Inputs,
    *,
    ort: str = "1.31",
    extensions: frozenset[str] = frozenset(),
) -> Float64:
    """Return ``sum p |v|`` of every output value; the caches stay as they are.

    Args:
        attributes: the node's attributes, or a mapping of them.
        inputs: arrays by schema name, the caches as they are before the call.
        ort: the ONNX Runtime release whose rules apply.
        extensions: as for `paged_attention`.

    Returns:
        (tokens, num_heads * v_head_size) float64.

    Raises:
        What `paged_attention` raises.
    """
    caches = {name: inputs[name] for name in _CACHES if name in inputs}
    copies = {name: array.copy() for name, array in caches.items() if isinstance(array, np.ndarray)}
    bound = resolve(attributes, {**inputs, **copies}, ort, extensions)
    result = np.zeros((bound.tokens, bound.call.num_heads, bound.v_head_size))
    with np.errstate(all="ignore"):
        forward = Forward.open(bound, COMMON, absolute=True)
        query = forward.append("ort", ExitStack())
        for tile in tiles(bound.call, forward.sequences):
            result[tile.tokens], _ = forward.attend(tile, query[tile.tokens])
    result[forward.sequences.idle] = 0
    return result.reshape(bound.tokens, bound.call.num_heads * bound.v_head_size)


def unit_roundoff(dtype: DType) -> float:
    """Return half the relative spacing of a floating type."""
    return 2.0 ** -DIGITS[dtype][0]


def one_unit(expected: Array) -> Float64:
    """One representable value up or down.

    Error model: both results round the same real number to T, but one by way of float32 sums. They can end on
    the two sides of a tie, and no further apart.

    Args:
        expected: (tokens, channels) in T.
    """
    values = np.abs(upcast(expected))
    digits, lowest = DIGITS[expected.dtype]
    exponent = np.floor(np.log2(np.maximum(values, 2.0**lowest)))
    units: Float64 = np.exp2(exponent + 1 - digits)
    return units


def float32_sums(magnitudes: Float64, head_size: int, keys: int, largest_logit: float) -> Float64:
    """Accumulation in float32, in any order.

    Error model: a dot product over n terms in float32 has an error of at most ``n u sum |a b|``; that of a
    logit (n = head_size) multiplies a weight by its exponential, and the sums over the keys add theirs. The
    bound holds for every order of summation and is far above what happens, as errors mostly cancel.

    Args:
        magnitudes: (tokens, channels), from `magnitude`.
        head_size: channels of a key.
        keys: most keys that a row sees.
        largest_logit: largest ``scale * sum |q k|``, before a softcap.
    """
    logits = 2 * (head_size + 4) * FLOAT32_ROUNDOFF * largest_logit
    return magnitudes * math.expm1(logits + 2 * (keys + 8) * FLOAT32_ROUNDOFF)


def rounded_weights(magnitudes: Float64, dtype: DType, *, keys: int, largest_value: float) -> Float64:
    """Softmax weights rounded to T before they meet the values, as FlashAttention and its kin do.

    Error model: each weight, at most 1 once the maximum is taken off, changes by a relative u, or by half the
    smallest subnormal if that is more. The denominator, at least 1, is summed before the rounding. So the
    output changes by at most u times its magnitude, plus what the smallest weights lose.

    Args:
        magnitudes: (tokens, channels), from `magnitude`.
        dtype: the type of the weights.
        keys: most keys that a row sees.
        largest_value: largest ``|v|``.
    """
    digits, lowest = DIGITS[dtype]
    smallest = 2.0 ** (lowest + 1 - digits)
    return unit_roundoff(dtype) * magnitudes + keys * smallest / 2 * largest_value


def rounded_copies(magnitudes: Float64, dtype: DType, largest_logit: float) -> Float64:
    """A quantised cache dequantised into a copy in T.

    Error model: keys change by a relative u, hence a logit by ``u * largest_logit`` and a weight by a factor
    of its exponential, in numerator and denominator; values change by a relative u themselves.

    Args:
        magnitudes: (tokens, channels), from `magnitude`.
        dtype: the type of the copy.
        largest_logit: largest ``scale * sum |q k|``, before a softcap.
    """
    u = unit_roundoff(dtype)
    return magnitudes * math.expm1(2 * u * largest_logit + u)


def rounded_output(expected: Array, roundings: int = 1) -> Float64:
    """The output rounded to T, once or (a head sink on top of FlashAttention) twice.

    Error model: each rounding is at most half a unit of the result.

    Args:
        expected: (tokens, channels) in T.
        roundings: how many.
    """
    return one_unit(expected) * (0.5 * roundings + 0.5)


def onnxruntime_tests() -> float:
    """5e-3: what ONNX Runtime's own tests of this operator allow for float16, absolute and relative."""
    return 5e-3


def cache_codes() -> int:
    """1: codes of a quantised cache may differ by one step, where a value lies beside a tie."""
    return 1


__all__ = [
    "cache_codes",
    "float32_sums",
    "magnitude",
    "one_unit",
    "onnxruntime_tests",
    "rounded_copies",
    "rounded_output",
    "rounded_weights",
    "unit_roundoff",
]
