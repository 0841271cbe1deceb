"""A greedy decode in many caches at once: one row of the batch for each, so that the weights are read once.

Every row has its own cache, grows by itself and takes its own tokens; nothing of one row reaches another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from paged_bench.demo.llama import Llama
from paged_bench.errors import BackendError
from paged_bench.residency.attention import Array, rotate
from paged_bench.residency.lane import Lane


def decode(
    model: Llama, prompt_ids: Sequence[int], lanes: Sequence[Lane], new: int, tables: tuple[Array, Array]
) -> None:
    """Decode `new` tokens in every lane; the first comes from the prompt's step.

    Args:
        model: The model.
        prompt_ids: The prompt, the same for every lane.
        lanes: The caches, empty.
        new: Tokens to decode.
        tables: Cosines and sines, (positions, rotary_dim / 2), for every position of the sequence.

    Raises:
        BackendError: The logits are not finite, or a cache may not grow.
    """
    token_ids = [list(prompt_ids) for _ in lanes]
    past = 0
    for _ in range(new):
        count = len(token_ids[0])
        for lane in lanes:
            lane.grow(past + count)
        with ExitStack() as steps:
            for lane in lanes:
                steps.enter_context(lane.step(past, count))
            attention = _Attention(model, lanes, past, count, tables)
            rows = np.arange(1, len(lanes) + 1) * count - 1
            flat = np.array([token for ids in token_ids for token in ids], np.int64)
            logits = model.logits(flat, rows, attention)
        chosen = _greedy(logits)
        for lane, token in zip(lanes, chosen, strict=True):
            lane.token_ids.append(token)
        token_ids = [[token] for token in chosen]
        past += count


def _greedy(logits: Array) -> list[int]:
    chosen: NDArray[np.int64] = logits.argmax(axis=1)
    if not np.isfinite(logits[np.arange(len(chosen)), chosen]).all():
        raise BackendError("the model's logits", "are not finite", "use another model file")
    return [int(token) for token in chosen]


class _Attention:
    """One step's attention: rotated once for all, then each row against its own cache."""

    def __init__(
        self, model: Llama, lanes: Sequence[Lane], past: int, count: int, tables: tuple[Array, Array]
    ) -> None:
        self._config = model.config
        self._lanes, self._past, self._count = lanes, past, count
        self._cos, self._sin = (np.tile(table[past : past + count], (len(lanes), 1)) for table in tables)

    def __call__(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        size = self._config.head_size
        queries = rotate(query.reshape(len(query), -1, size), self._cos, self._sin)
        keys = rotate(key.reshape(len(key), -1, size), self._cos, self._sin).astype(np.float16)
        values = value.reshape(len(value), -1, size).astype(np.float16)
        output = np.empty_like(queries)
        for index, lane in enumerate(self._lanes):
            own = slice(index * self._count, (index + 1) * self._count)
            output[own] = lane.attend(layer, queries[own], keys[own], values[own], self._past)
        return output.reshape(query.shape)
