"""What proves that a graph over a growing cache stays right: the same work over fresh memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paged_bench.residency.reader import Access, Rows

Outputs = list[NDArray[np.float32]]


class Probe(Protocol):
    """Attends over every layer of a cache, with rows of its own making."""

    def fill(self, layers: Sequence[Rows], first: int, end: int) -> None:
        """Write the rows of the tokens [first, end) into every binding."""
        ...

    def run(self, layers: Sequence[Rows], access: Access, past: int) -> Outputs:
        """Append one token to every binding, attend, and return each layer's output."""
        ...

    def fresh(self, past: int) -> Outputs:
        """The same, launched over ordinary, sequence-major allocations that were filled from the host."""
        ...

    def close(self) -> None:
        """Let graph and buffers go."""
        ...
