"""Attention of the demo's model over caches under test, and where the rest of its keys and values lie.

The model's layers and heads fill a cache's bindings as far as both go: binding (layer, head) holds the
model's keys of that layer and head. What the cache has no place for stays in arrays beside it. A cache that
loses, moves or zeroes a row wrongly therefore changes the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_bench.demo.config import LlamaConfig
from paged_bench.residency.shapes import KvShape

Array = NDArray[np.float32]
Half = NDArray[np.float16]


def attend(query: Array, keys: Half, values: Half, past: int, scale: float) -> Array:
    """Causal attention of new tokens over a sequence's rows.

    Args:
        query: (tokens, heads, head_size).
        keys: (kv_heads, length, head_size), the new tokens' own among them.
        values: As keys.
        past: Tokens before the new ones.
        scale: Factor of the scores.

    Returns:
        (tokens, heads, head_size) float32.
    """
    tokens, heads, head_size = query.shape
    kv_heads, length, _ = keys.shape
    grouped = query.reshape(tokens, kv_heads, heads // kv_heads, head_size).transpose(1, 2, 0, 3)
    scores = np.matmul(grouped, keys.astype(np.float32).transpose(0, 2, 1)[:, None]) * np.float32(scale)
    if tokens > 1:
        hidden = np.arange(length) > past + np.arange(tokens)[:, None]
        scores[..., hidden] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = np.matmul(weights, values.astype(np.float32)[:, None])
    return mixed.transpose(2, 0, 1, 3).reshape(tokens, heads, head_size)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate half-split pairs of (tokens, heads, head_size) by (tokens, rotary_dim / 2) tables."""
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    rotated: Array = np.concatenate((first * c - second * s, second * c + first * s, rest), axis=-1)
    return rotated


@dataclass(frozen=True)
class Residents:
    """Which part of the model's cache lies in the cache under test.

    Attributes:
        layers: The first layers of the model.
        kv_heads: The first key-value heads of each of them.
        group: Query heads of one key-value head.
    """

    layers: int
    kv_heads: int
    group: int

    @classmethod
    def of(cls, config: LlamaConfig, shape: KvShape) -> Residents:
        """As many layers and heads as both the model and the shape have."""
        return cls(
            min(config.layers, shape.layers),
            min(config.kv_heads, shape.kv_heads),
            config.heads // config.kv_heads,
        )

    def heads(self, layer: int) -> int:
        """Key-value heads of `layer` in the cache under test."""
        return self.kv_heads if layer < self.layers else 0


class Beside:
    """The keys and values that the cache under test has no place for, in float16 like the others.

    Args:
        config: The model.
        residents: What lies elsewhere.
        longest: Tokens of the longest sequence.
    """

    def __init__(self, config: LlamaConfig, residents: Residents, longest: int) -> None:
        self._scale = config.head_size**-0.5
        self._rows = [
            np.zeros((2, config.kv_heads - residents.heads(layer), longest, config.head_size), np.float16)
            for layer in range(config.layers)
        ]

    def attend(self, layer: int, query: Array, key: Half, value: Half, past: int) -> Array:
        """Store new rows and attend; shapes as in `attend`, new rows (tokens, kv_heads, head_size)."""
        length = past + len(query)
        keys, values = self._rows[layer]
        keys[:, past:length], values[:, past:length] = key.swapaxes(0, 1), value.swapaxes(0, 1)
        return attend(query, keys[:, :length], values[:, :length], past, self._scale)
