"""Rotary position embedding: the tables, and the one reordering that GGUF's llama files need.

A llama GGUF holds the query and key rows of each head so that channels 2r and 2r+1 form the r-th
rotary pair. This project rotates the half-split way, channel r with channel r + rotary_dim/2. Scores
do not change when the channels of queries and keys are permuted alike, so the rows are reordered once,
at load time, and every layout and backend sees half-split heads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_bench.demo.config import LlamaConfig
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.errors import ModelFileError

ROPE_FACTORS = "rope_freqs.weight"


def half_split_order(heads: int, head_size: int, rotary_dim: int) -> NDArray[np.int64]:
    """Source rows that turn adjacent rotary pairs into half-split ones.

    Returns:
        (heads * head_size,) indices: for each head its even rotary rows, then its odd ones, then the
        rows that are not rotated.
    """
    head = np.concatenate(
        [np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2), np.arange(rotary_dim, head_size)]
    )
    rows: NDArray[np.int64] = (np.arange(heads)[:, None] * head_size + head).reshape(-1)
    return rows


def read_tables(
    file: GgufFile, config: LlamaConfig, positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The model's tables for that many positions, with the file's own frequency divisors if it has them.

    Raises:
        ModelFileError: The divisors are misshapen, or one is not positive.
    """
    if not file.has_tensor(ROPE_FACTORS):
        return rope_tables(config, positions)
    factors = file.tensor(ROPE_FACTORS, (config.rotary_dim // 2,))
    if not (factors > 0).all():
        raise ModelFileError(f"tensor {ROPE_FACTORS!r}", "holds a divisor that is not positive")
    return rope_tables(config, positions, factors)


def rope_tables(
    config: LlamaConfig, positions: int, factors: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The cosine and sine of every position and rotary pair.

    The angle of pair r at position p is p / rope_factor * rope_base ** (-2r / rotary_dim) / factors[r].

    Args:
        config: Gives the base, the linear factor and the rotary width.
        positions: Rows of the tables.
        factors: (rotary_dim / 2,) frequency divisors of the file, or None.

    Returns:
        Two (positions, rotary_dim / 2) float32 arrays.
    """
    pairs = np.arange(0, config.rotary_dim, 2, dtype=np.float64)
    frequency = config.rope_base ** (-pairs / config.rotary_dim)
    if factors is not None:
        frequency = frequency / factors
    angle = np.arange(positions, dtype=np.float64)[:, None] / config.rope_factor * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
