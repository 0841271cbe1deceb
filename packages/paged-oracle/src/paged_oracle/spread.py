"""Work on tiles, on all cores where the tiles are large.

Invariant: tiles do not share what they write, so their order and the number of threads change nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from paged_oracle.tiles import Tile

WORTH_A_THREAD = 128
"""Query rows of a tile from which NumPy's share of the work, done without the interpreter's lock, outweighs
ours."""

MOST_THREADS = 8


def spread(work: Callable[[Tile], None], tiles: Iterable[Tile], num_heads: int) -> None:
    """Call `work` once for every tile; the first error is raised.

    Args:
        work: what to do; it may be called from several threads at once.
        tiles: the tiles of a call.
        num_heads: query heads, to tell how large a tile is.
    """
    pending = list(tiles)
    large = sum(tile.count * num_heads >= WORTH_A_THREAD for tile in pending)
    threads = min(large, cores(), MOST_THREADS)
    if threads < 2:
        for tile in pending:
            work(tile)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, pending):
            pass


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
