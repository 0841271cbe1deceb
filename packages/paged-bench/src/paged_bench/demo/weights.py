"""The float32 weights of a llama model; each matrix is written once, straight to its final place.

Matrices that read the same input are stacked (query, key and value; gate and up), so that a step
multiplies four times a block. A stacked matrix is allocated whole and filled part by part: the
largest temporary copy is one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_bench.demo.config import LlamaConfig
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.rope import ROPE_FACTORS, half_split_order

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Linear:
    """y = x W + b, with weight (in, out), the faster order for few tokens, and bias (out,) or None."""

    weight: Matrix
    bias: Matrix | None

    def __call__(self, x: Matrix) -> Matrix:
        """Apply to x (tokens, in); returns (tokens, out)."""
        y: Matrix = x @ self.weight
        if self.bias is not None:
            y += self.bias
        return y


@dataclass(frozen=True)
class Block:
    """One transformer block."""

    attention_norm: Matrix  # (width,)
    query_key_value: Linear  # width -> query_width + 2 * kv_width, half-split heads
    attention_output: Linear  # query_width -> width
    feed_forward_norm: Matrix  # (width,)
    gate_up: Linear  # width -> 2 * hidden
    down: Linear  # hidden -> width


@dataclass(frozen=True)
class Weights:
    """All weights. `output` is `embedding` itself when the file ties them."""

    embedding: Matrix  # (vocabulary, width)
    blocks: tuple[Block, ...]
    output_norm: Matrix  # (width,)
    output: Matrix  # (vocabulary, width)


def read_weights(file: GgufFile, config: LlamaConfig) -> Weights:
    """Dequantise every tensor of the file.

    Raises:
        ModelFileError: A tensor is missing, misshapen, not readable, or one too many.
    """
    embedding = file.tensor("token_embd.weight", (config.vocabulary, config.width))
    tied = not file.has_tensor("output.weight")
    weights = Weights(
        embedding=embedding,
        blocks=tuple(_read_block(file, config, f"blk.{index}") for index in range(config.layers)),
        output_norm=file.tensor("output_norm.weight", (config.width,)),
        output=embedding if tied else file.tensor("output.weight", embedding.shape),
    )
    file.refuse_unused(harmless=(ROPE_FACTORS,))
    return weights


def _read_block(file: GgufFile, config: LlamaConfig, prefix: str) -> Block:
    query_order = half_split_order(config.heads, config.head_size, config.rotary_dim)
    key_order = half_split_order(config.kv_heads, config.head_size, config.rotary_dim)
    value_order = np.arange(config.kv_width)
    return Block(
        attention_norm=file.tensor(f"{prefix}.attn_norm.weight", (config.width,)),
        query_key_value=_stack(
            file,
            {f"{prefix}.attn_q": query_order, f"{prefix}.attn_k": key_order, f"{prefix}.attn_v": value_order},
            config.width,
        ),
        attention_output=_linear(file, f"{prefix}.attn_output", config.width, config.query_width),
        feed_forward_norm=file.tensor(f"{prefix}.ffn_norm.weight", (config.width,)),
        gate_up=_stack(
            file,
            {f"{prefix}.ffn_gate": np.arange(config.hidden), f"{prefix}.ffn_up": np.arange(config.hidden)},
            config.width,
        ),
        down=_linear(file, f"{prefix}.ffn_down", config.width, config.hidden),
    )


def _linear(file: GgufFile, name: str, out: int, into: int) -> Linear:
    return _stack(file, {name: np.arange(out)}, into)


def _stack(file: GgufFile, parts: dict[str, NDArray[np.int64]], into: int) -> Linear:
    """Stack tensors by their output channels, each in its own order."""
    total = sum(len(order) for order in parts.values())
    weight = np.empty((into, total), np.float32)
    bias = np.zeros(total, np.float32)
    biased = False
    start = 0
    for name, order in parts.items():
        stop = start + len(order)
        weight[:, start:stop] = file.tensor(f"{name}.weight", (len(order), into))[order].T
        if file.has_tensor(f"{name}.bias"):
            bias[start:stop] = file.tensor(f"{name}.bias", (len(order),))[order]
            biased = True
        start = stop
    return Linear(weight, bias if biased else None)
