"""The llama forward pass in NumPy float32; attention is a callable and the only thing with a memory.

A step takes a ragged batch: the new tokens of all its sequences, one after the other. Everything but
attention acts on each token alone, so this module never learns where a sequence starts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paged_bench.demo.config import LlamaConfig
from paged_bench.demo.weights import Block, Weights

Array = NDArray[np.float32]


class Attention(Protocol):
    """Attention of one block over a batch's pages."""

    def __call__(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        """Store the new keys and values, then attend.

        Args:
            layer: Index of the block.
            query: (tokens, heads * head_size), not rotated, half-split heads.
            key: (tokens, kv_heads * head_size), not rotated, half-split heads.
            value: (tokens, kv_heads * head_size).

        Returns:
            (tokens, heads * head_size).
        """
        ...


class Llama:
    """A llama model: token ids in, logits out.

    Args:
        config: The geometry.
        weights: Weights of that geometry.
    """

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights

    def logits(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64], attention: Attention) -> Array:
        """Run one step.

        Args:
            token_ids: (tokens,) the batch's new tokens.
            rows: (n,) the tokens whose next-token logits are wanted.
            attention: Called once for each block, in order.

        Returns:
            (n, vocabulary) logits.
        """
        x: Array = self.weights.embedding[token_ids]
        for layer, block in enumerate(self.weights.blocks):
            x += self._attend(layer, block, x, attention)
            x += self._feed_forward(block, x)
        final = rms_norm(x[rows], self.weights.output_norm, self.config.epsilon)
        # This way round BLAS does not repack the largest matrix of the model for a few rows.
        logits: Array = (self.weights.output @ final.T).T
        return logits

    def _attend(self, layer: int, block: Block, x: Array, attention: Attention) -> Array:
        config = self.config
        mixed = block.query_key_value(rms_norm(x, block.attention_norm, config.epsilon))
        query, key, value = np.split(
            mixed, [config.query_width, config.query_width + config.kv_width], axis=1
        )
        return block.attention_output(attention(layer, query, key, value))

    def _feed_forward(self, block: Block, x: Array) -> Array:
        mixed = block.gate_up(rms_norm(x, block.feed_forward_norm, self.config.epsilon))
        gate, up = np.split(mixed, 2, axis=1)
        return block.down(silu(gate) * up)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Root-mean-square norm over the last axis: x / sqrt(mean(x^2) + epsilon) * weight."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    root: Array = np.sqrt(mean_square + np.float32(epsilon), dtype=np.float32)
    normed: Array = x / root * weight
    return normed


def silu(x: Array) -> Array:
    """The gate x * sigmoid(x), by tanh so that no exponential overflows."""
    half = np.float32(0.5)
    gated: Array = x * (half + half * np.tanh(half * x))
    return gated
