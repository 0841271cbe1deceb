"""How the model's queries, keys and values become the operator's inputs, in either cache layout.

Both layouts compute the same attention. SEPARATE keeps the model's grouped heads in two caches. LATENT
keeps one row a token in one cache, the value heads then the key heads, and one wide key-value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from paged_oracle.latent import GqaLatent
from paged_schema import PagedAttentionAttributes

from paged_bench.demo.config import LlamaConfig

Array = NDArray[np.float32]


@dataclass(frozen=True)
class OpTensors:
    """One step's operands of one block; `value` is None when the row of `key` holds the values."""

    query: Array  # (tokens, num_heads * head_size)
    key: Array  # (tokens, kv_num_heads * head_size)
    value: Array | None  # (tokens, kv_num_heads * head_size)


class CacheLayout(Protocol):
    """A cache layout of the operator, for one model."""

    @property
    def name(self) -> str:
        """`separate` or `latent`."""
        ...

    @property
    def attributes(self) -> PagedAttentionAttributes:
        """The operator's attributes."""
        ...

    @property
    def row(self) -> tuple[int, int]:
        """(kv_num_heads, head_size) of a cache."""
        ...

    @property
    def has_value_cache(self) -> bool:
        """Whether values have a cache of their own."""
        ...

    def tables(self, cos: Array, sin: Array) -> tuple[Array, Array]:
        """The rotary tables as this layout's heads need them."""
        ...

    def operands(self, query: Array, key: Array, value: Array) -> OpTensors:
        """The operator's operands from the model's projections."""
        ...

    def heads(self, output: Array) -> Array:
        """The model's (tokens, heads * head_size) from the operator's output."""
        ...


@dataclass(frozen=True)
class SeparateLayout:
    """Grouped-query attention as the model has it."""

    config: LlamaConfig
    name: str = "separate"
    has_value_cache: bool = True

    @property
    def attributes(self) -> PagedAttentionAttributes:
        """Rotary inside the operator, half-split pairs."""
        config = self.config
        return PagedAttentionAttributes(
            num_heads=config.heads, kv_num_heads=config.kv_heads, scale=config.head_size**-0.5, do_rotary=1
        )

    @property
    def row(self) -> tuple[int, int]:
        """The model's own key-value heads."""
        return self.config.kv_heads, self.config.head_size

    def tables(self, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Unchanged."""
        return cos, sin

    def operands(self, query: Array, key: Array, value: Array) -> OpTensors:
        """Unchanged."""
        return OpTensors(query, key, value)

    def heads(self, output: Array) -> Array:
        """Unchanged."""
        return output


@dataclass(frozen=True)
class LatentLayout:
    """The same attention with one shared row a token, by `GqaLatent`."""

    config: LlamaConfig
    name: str = "latent"
    has_value_cache: bool = False

    @cached_property
    def _map(self) -> GqaLatent:
        config = self.config
        return GqaLatent(config.heads, config.kv_heads, config.head_size, config.rotary_dim)

    @property
    def attributes(self) -> PagedAttentionAttributes:
        """One key-value head; only the key part of a row is rotated."""
        return PagedAttentionAttributes(
            num_heads=self.config.heads,
            kv_num_heads=1,
            scale=self.config.head_size**-0.5,
            do_rotary=1,
            kv_cache_layout="LATENT",
            v_head_size=self._map.v_head_size,
            rotary_offset=self._map.rotary_offset,
        )

    @property
    def row(self) -> tuple[int, int]:
        """One head: all value heads, then all key heads."""
        return 1, self._map.head_size_latent

    def tables(self, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Repeated for each key head."""
        return self._map.tables(cos, sin)

    def operands(self, query: Array, key: Array, value: Array) -> OpTensors:
        """Queries are zero outside their own key slice."""
        return OpTensors(self._map.queries(query), self._map.rows(key, value), None)

    def heads(self, output: Array) -> Array:
        """Each query head takes its own value slice."""
        return self._map.outputs(output)


LAYOUTS: dict[str, Callable[[LlamaConfig], CacheLayout]] = {
    "separate": SeparateLayout,
    "latent": LatentLayout,
}
