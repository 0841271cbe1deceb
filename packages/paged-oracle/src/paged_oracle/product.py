"""Matrix products that BLAS spreads over threads only where that pays.

Invariant: every element is one whole dot product, computed as `numpy.matmul` does; only rows and columns are
cut apart.

OpenBLAS shares a product out as soon as it has 2^18 multiply-adds, some 20 us of work. On a machine with
other things to do, one thread then waits for another that is not running: on two busy cores a decode step of
the demo took 30 times as long as with one thread, and on idle ones it took no less. So a product is cut into
parts below that limit, unless it is large enough to be worth the wait.
"""

from __future__ import annotations

import numpy as np

from paged_oracle.dtypes import Float64

THREADING_LIMIT = 1 << 18
WORTH_THREADS = 1 << 25
ROWS = 16
NARROWEST = 16


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
    if rows * inner * columns >= WORTH_THREADS:
        whole: Float64 = np.matmul(left, right)
        return whole
    result = np.empty((stack, rows // ROWS, ROWS, columns))
    parts = left.reshape(stack, rows // ROWS, ROWS, inner)
    width = _width(ROWS * inner, columns)
    for start in range(0, columns, width):
        part = slice(start, start + width)
        np.matmul(parts, right[:, None, :, part], out=result[..., part])
    return result.reshape(stack, rows, columns)


def _width(work: int, columns: int) -> int:
    """Return how many columns to multiply at once, given the multiply-adds of one."""
    width = max(columns, 1)
    while width * work > THREADING_LIMIT and width % (2 * NARROWEST) == 0:
        width //= 2
    return width
