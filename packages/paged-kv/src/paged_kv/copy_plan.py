"""Copies that the caller must carry out: the manager never touches the bytes of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Copy the first `tokens[i]` rows of page `source[i]` to page `target[i]`, in every layer and tensor.

    Run it before the step's kernels and on the same stream. No page is both a source and a target, so the
    order within the plan is free.

    Attributes:
        source: ``(copies,)`` int32 page ids.
        target: ``(copies,)`` int32 page ids.
        tokens: ``(copies,)`` int32, how many token rows of the page are alive.
    """

    source: Int32Array
    target: Int32Array
    tokens: Int32Array

    def __len__(self) -> int:
        return len(self.source)

    def apply(self, cache: npt.NDArray[np.generic]) -> None:
        """Carry the plan out on a NumPy cache ``(num_blocks, block_size, ...)``."""
        for source, target, tokens in zip(self.source, self.target, self.tokens, strict=True):
            cache[target, :tokens] = cache[source, :tokens]
