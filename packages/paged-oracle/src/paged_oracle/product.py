"""Matrix products whose bits do not depend on how many rows they have.

Invariant: BLAS only ever sees the same shapes for given head sizes, `ROWS` rows at a time, so that a row gets
the same bits whatever stands around it.

The shapes are also small enough, up to 1,024 channels, for OpenBLAS to leave them to one thread. It shares
out larger ones, and then waits for threads that a busy machine does not run: on two such cores a decode step
of the demo took 30 times as long. `attention` spreads whole tiles over threads instead.
"""

from __future__ import annotations

import numpy as np

from paged_oracle.dtypes import Float64

ROWS = 16
NARROWEST = 16
THREADING_LIMIT = 1 << 18
"""Multiply-adds beyond which OpenBLAS uses more than one thread."""


def product(left: Float64, right: Float64) -> Float64:
    """Multiply stacks of matrices.

    Args:
        left: (stack, rows, inner), contiguous, `rows` a multiple of `ROWS`.
        right: (stack, inner, columns).

    Returns:
        (stack, rows, columns).
    """
    stack, rows, inner = left.shape
    columns = right.shape[2]
    result = np.empty((stack, rows // ROWS, ROWS, columns))
    parts = left.reshape(stack, rows // ROWS, ROWS, inner)
    width = max(NARROWEST, THREADING_LIMIT // (ROWS * inner) // NARROWEST * NARROWEST)
    for start in range(0, columns, width):
        part = slice(start, start + width)
        np.matmul(parts, right[:, None, :, part], out=result[..., part])
    return result.reshape(stack, rows, columns)
