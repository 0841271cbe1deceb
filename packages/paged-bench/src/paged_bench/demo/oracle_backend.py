"""Attention by the NumPy reference; the caches are host arrays that it updates in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from paged_kv import PagedIndexPlan
from paged_oracle import paged_attention

from paged_bench.demo.backend import NUMPY_DTYPES, Array, BackendSpec, cast


class OracleBackend:
    """Runs `paged_oracle.paged_attention`; float32 is its extension beyond ORT.

    Args:
        spec: What to build the caches for.
    """

    name = "oracle"
    device = "CPU (NumPy reference)"

    def __init__(self, spec: BackendSpec) -> None:
        self._spec = spec
        self._dtype = NUMPY_DTYPES[spec.dtype]
        self._attributes = spec.layout.attributes
        self._extensions = frozenset({"float32"}) if spec.dtype == "float32" else frozenset()
        cos, sin = spec.layout.tables(spec.cos, spec.sin)
        self._tables = {"cos_cache": self._cast(cos), "sin_cache": self._cast(sin)}
        self._caches = [self._new_caches() for _ in range(spec.layers)]
        self._plan: dict[str, NDArray[np.generic]] = {}

    def begin(self, plan: PagedIndexPlan) -> None:
        """Take the step's five int32 tensors."""
        self._plan = {
            "cumulative_sequence_length": plan.cumulative_sequence_length,
            "past_seqlens": plan.past_seqlens,
            "block_table": plan.block_table,
            "slot_mapping": plan.slot_mapping,
            "attention_metadata": plan.attention_metadata,
        }

    def attend(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        """One operator call; the new keys and values are in the pages when it returns."""
        operands = self._spec.layout.operands(query, key, value)
        inputs = {
            "query": self._cast(operands.query),
            "key": self._cast(operands.key),
            "value": None if operands.value is None else self._cast(operands.value),
            **self._caches[layer],
            **self._tables,
            **self._plan,
        }
        outputs = paged_attention(self._attributes, inputs, extensions=self._extensions)
        return self._spec.layout.heads(outputs.output.astype(np.float32, copy=False))

    def _new_caches(self) -> dict[str, NDArray[np.generic]]:
        names = ("key_cache", "value_cache") if self._spec.layout.has_value_cache else ("key_cache",)
        return {name: np.zeros(self._spec.cache_shape, self._dtype) for name in names}

    def _cast(self, array: Array) -> NDArray[np.generic]:
        return cast(array, self._dtype)
