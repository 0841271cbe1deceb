"""Attention of a tile of query rows over chunks of keys, with a running softmax.

Invariant: the bits of a row do not depend on its neighbours in the tile, on how many chunks the neighbours
need, or on where the keys came from. Three rules give that: chunks start at multiples of a fixed length,
counted from position 0, and are always full (unused places are masked); `product` shows BLAS the same shapes;
a chunk in which a row sees nothing multiplies its sums by 1 and adds 0.

Everything is float64. ONNX Runtime accumulates in float32 in an order that is no part of its contract; its
results scatter around these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paged_oracle.dtypes import Bool, DType, Float64, round_to, upcast
from paged_oracle.product import product


@dataclass(eq=False)
class RunningSoftmax:
    """Softmax-weighted sums of values, kept up to date chunk by chunk.

    Attributes:
        queries: (kv_num_heads, rows, head_size), `rows` a multiple of `product.ROWS`.
        v_head_size: channels of a value.
        scale: logit multiplier.
        softcap: cap of the scaled logits by tanh; 0 for none.
        weight_dtype: the type that weights are rounded to before they meet the values, or None.
        sink_dtype: the type that the output is rounded to before the sink scales it, or None.
        maximum: (kv_num_heads, rows) largest logit so far; -inf before the first visible key.
        total: (kv_num_heads, rows) sum of ``exp(logit - maximum)``.
        weighted: (kv_num_heads, rows, v_head_size) sum of ``exp(logit - maximum) * value``.
    """

    queries: Float64
    v_head_size: int
    scale: float
    softcap: float
    weight_dtype: DType | None = None
    sink_dtype: DType | None = None
    maximum: Float64 = field(init=False)
    total: Float64 = field(init=False)
    weighted: Float64 = field(init=False)

    def __post_init__(self) -> None:
        rows = self.queries.shape[:2]
        self.maximum = np.full(rows, -np.inf)
        self.total = np.zeros(rows)
        self.weighted = np.zeros((*rows, self.v_head_size))

    def add(self, keys: Float64, values: Float64, visible: Bool | None) -> None:
        """Take in one chunk.

        Args:
            keys: (kv_num_heads, chunk, head_size).
            values: (kv_num_heads, chunk, v_head_size).
            visible: (rows, chunk), or None when every row sees every key.
        """
        logits = self._logits(keys)
        if visible is not None:
            np.copyto(logits, -np.inf, where=~visible)
        maximum = np.maximum(self.maximum, logits.max(axis=-1))
        shift = np.where(np.isneginf(maximum), 0.0, maximum)
        keep = np.exp(self.maximum - shift)
        np.subtract(logits, shift[..., None], out=logits)
        weights = np.exp(logits, out=logits)
        self.total *= keep
        self.total += weights.sum(axis=-1)
        self.weighted *= keep[..., None]
        if self.weight_dtype is not None:
            weights = upcast(round_to(weights.astype(np.float32), self.weight_dtype))
        self.weighted += _weigh(weights, values, visible)
        self.maximum = maximum

    def finish(self, sink: Float64 | None) -> tuple[Float64, Float64]:
        """Return the attention output and the log-sum-exp.

        Args:
            sink: (kv_num_heads, rows) logit of a virtual key without a value, neither scaled nor capped.

        Returns:
            Output (kv_num_heads, rows, v_head_size), zero for a row that saw no key, and the natural
            logarithm of the denominator (kv_num_heads, rows), the sink's term included; -inf when it is
            empty.
        """
        total, weighted, maximum = self.total, self.weighted, self.maximum
        if sink is not None and self.sink_dtype is not None:
            rounded = round_to((weighted / _divisor(total)).astype(np.float32), self.sink_dtype)
            weighted = upcast(rounded) * total[..., None]
        if sink is not None:
            maximum = np.maximum(maximum, sink)
            shift = np.where(np.isneginf(maximum), 0.0, maximum)
            keep = np.exp(self.maximum - shift)
            total = total * keep + np.exp(sink - shift)
            weighted = weighted * keep[..., None]
        return weighted / _divisor(total), np.where(total == 0, -np.inf, maximum + np.log(total))

    def _logits(self, keys: Float64) -> Float64:
        scores = product(self.queries, keys.swapaxes(-1, -2))
        if self.softcap > 0:
            scores *= self.scale / self.softcap
            return np.tanh(scores, out=scores) * self.softcap
        scores *= self.scale
        return scores


def _divisor(total: Float64) -> Float64:
    return np.where(total == 0, 1.0, total)[..., None]


def _weigh(weights: Float64, values: Float64, visible: Bool | None) -> Float64:
    result = product(weights, values)
    if visible is None or np.isfinite(result).all():
        return result
    # 0 * inf is NaN: a key that a row does not see must not reach it, whatever its value holds. The finite
    # channels of such a key stay in the product, where they keep their place in the sum.
    finite = np.isfinite(values)
    result = product(weights, np.where(finite, values, 0.0))
    for place in np.flatnonzero(~finite.all(axis=(0, 2))):
        term = weights[..., place, None] * values[:, place, None, :]
        np.add(result, term, out=result, where=visible[:, place, None] & ~finite[:, place, None, :])
    return result
