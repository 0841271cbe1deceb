"""One variant of a cache while a sequence grows in it: growth first, then the step, counted as it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from paged_bench.residency.attention import Array, Beside, Half, Residents
from paged_bench.residency.cache import GrowingCache
from paged_bench.residency.reader import Access, Reader
from paged_bench.residency.results import LaneResult, StepResult
from paged_bench.residency.shapes import KvShape, Variant


class Lane:
    """One sequence in one cache.

    Args:
        variant: How the cache is held.
        shape: Whose cache it is.
        residents: What of the model lies in it.
        cache: The storage, its growth and its graph.
        reader: Who attends over it.
        beside: Where the rest of the model's keys and values are.

    Attributes:
        token_ids: The decoded tokens.
        steps: What happened at each step.
    """

    def __init__(
        self,
        variant: Variant,
        shape: KvShape,
        residents: Residents,
        cache: GrowingCache,
        reader: Reader,
        beside: Beside,
    ) -> None:
        self.variant = variant
        self.shape = shape
        self.cache = cache
        self.token_ids: list[int] = []
        self.steps: list[StepResult] = []
        self._residents = residents
        self._reader = reader
        self._beside = beside
        self._access = Access.LAUNCH
        self._billed, self._grown, self._invalidated = 0, False, False

    def grow(self, tokens: int) -> None:
        """Make room for `tokens` tokens before the step that writes them.

        Raises:
            BackendError: The memory is refused.
        """
        before = self.cache.counters()
        self._billed = self.cache.ensure(tokens)
        after = self.cache.counters()
        self._grown = after.growth_events > before.growth_events
        self._invalidated = after.invalidations > before.invalidations

    @contextmanager
    def step(self, past: int, tokens: int) -> Iterator[None]:
        """Run one step; a prompt is launched, a decode step goes through the graph."""
        with self.cache.step(prefill=past == 0) as self._access:
            self._reader.begin(past, tokens)
            yield
        self.steps.append(
            StepResult(
                length=past + tokens,
                capacity=self.cache.capacity,
                access=self._access.value,
                billed_bytes=self._billed,
                grown=self._grown,
                invalidated=self._invalidated,
            )
        )

    def attend(self, layer: int, query: Array, key: Half, value: Half, past: int) -> Array:
        """Attention of one layer: the cache's heads by the reader, the others beside it.

        Args:
            layer: The model's layer.
            query: (tokens, heads, head_size), rotated.
            key: (tokens, kv_heads, head_size), rotated; `value` likewise.
            value: See `key`.
            past: Tokens in the cache before these.
        """
        heads = self._residents.heads(layer)
        split = heads * self._residents.group
        output = np.empty_like(query)
        if heads:
            output[:, :split] = self._reader.attend(
                self.cache.rows(layer), self._access, query[:, :split], key[:, :heads], value[:, :heads], past
            )
        if split < query.shape[1]:
            output[:, split:] = self._beside.attend(
                layer, query[:, split:], key[:, heads:], value[:, heads:], past
            )
        return output

    def result(self) -> LaneResult:
        """The decode so far, counted."""
        counters = self.cache.counters()
        return LaneResult(
            shape=self.shape.name,
            label=self.variant.label,
            layout=str(self.variant.layout),
            in_place=self.variant.in_place,
            capture=self.variant.capture,
            min_bucket=self.variant.min_bucket,
            attributed_bytes=self.cache.attributed_bytes,
            physical_bytes=self.cache.storage.physical_bytes,
            billed_bytes=self.cache.billed_bytes,
            growth_events=counters.growth_events,
            kv_bytes_moved=counters.kv_bytes_moved,
            actual_copy_bytes=counters.actual_copy_bytes,
            captures=counters.captures,
            replays=counters.replays,
            invalidations=counters.invalidations,
            growth_keeps=counters.growth_keeps,
            token_ids=tuple(self.token_ids),
            steps=tuple(self.steps),
        )

    def close(self) -> None:
        """Give everything back."""
        self._reader.close()
        self.cache.close()
