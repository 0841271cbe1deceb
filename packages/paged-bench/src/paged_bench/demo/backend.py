"""What every attention backend is: a cache per block, and one call per block and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from paged_kv import PagedIndexPlan, PageGeometry

from paged_bench.demo.layouts import CacheLayout

Array = NDArray[np.float32]

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def cast(array: Array, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Round to a backend's element type, contiguous."""
    # What does not fit becomes infinite, and the decoder refuses logits that are not finite.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype=dtype)


@dataclass(frozen=True)
class BackendSpec:
    """What a backend is built for.

    Attributes:
        layers: Blocks of the model; each has its own caches.
        layout: How projections become operands.
        geometry: The pool that the caches mirror.
        dtype: Element type of the operands and caches: a key of `NUMPY_DTYPES`.
        cos: (positions, rotary_dim / 2) rotary table of the model, and `sin` alike.
        sin: See `cos`.
        max_sequences: Most sequences of a step.
        max_tokens: Most tokens of a step.
        max_context: Longest sequence, in tokens.
    """

    layers: int
    layout: CacheLayout
    geometry: PageGeometry
    dtype: str
    cos: Array
    sin: Array
    max_sequences: int
    max_tokens: int
    max_context: int

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """(num_blocks, block_size, kv_num_heads, head_size) of one cache."""
        return self.geometry.num_blocks, self.geometry.block_size, *self.layout.row


class AttentionBackend(Protocol):
    """Paged attention of all blocks of a model over one pool."""

    @property
    def name(self) -> str:
        """`oracle` or `cuda`."""
        ...

    @property
    def device(self) -> str:
        """What it runs on, for people."""
        ...

    def begin(self, plan: PagedIndexPlan) -> None:
        """Start a step: every `attend` until the next `begin` reads this plan."""
        ...

    def attend(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        """As `paged_bench.demo.llama.Attention`."""
        ...
