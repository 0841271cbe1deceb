"""One step: the plan to the backend, the tokens through the model, the likeliest next tokens out."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from paged_kv import PagedIndexPlan

from paged_bench.demo.backend import AttentionBackend
from paged_bench.demo.llama import Array, Llama
from paged_bench.errors import BackendError


class GreedyDecoder:
    """Greedy decoding of a batch.

    Args:
        model: The model.
        backend: Its attention.

    Attributes:
        attention_seconds: Wall time spent in the backend so far.
    """

    def __init__(self, model: Llama, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend
        self.attention_seconds = 0.0

    def __call__(
        self, plan: PagedIndexPlan, token_ids: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As `paged_bench.demo.scheduler.NextTokens`.

        Raises:
            BackendError: The logits are not finite: the element type cannot hold the model's values.
        """
        began = perf_counter()
        self._backend.begin(plan)
        self.attention_seconds += perf_counter() - began
        logits = self._model.logits(token_ids, rows, self._attend)
        chosen: NDArray[np.int64] = logits.argmax(axis=1)
        # A NaN anywhere wins the comparison, so the chosen values tell about all of them.
        if not np.isfinite(logits[np.arange(len(chosen)), chosen]).all():
            raise BackendError("the model's logits", "are not finite", "use --dtype float32 or bfloat16")
        return chosen

    def _attend(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        began = perf_counter()
        output = self._backend.attend(layer, query, key, value)
        self.attention_seconds += perf_counter() - began
        return output
