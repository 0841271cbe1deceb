"""The manager's calls that move the end of its pool, so that memory behind the pages can come and go.

No page moves and no id changes: growing adds free pages behind the last one, shrinking takes free pages away
from the end. The caller has memory behind a page before it grows to it, and takes the memory away only after
it has shrunk.
"""

from __future__ import annotations

import numpy as np

from .authority import Authority
from .block_pool import CLEAN, EVICTABLE, FENCED, LIVE
from .errors import InvalidLength, StepOpen
from .geometry import is_integer
from .outcomes import PoolShrinkRefused
from .state import KVState


class PoolCalls(Authority):
    """Growing and shrinking."""

    @property
    def pool_blocks(self) -> int:
        """Pages that are there now, the null page included; ids are below it."""
        return self._state.pool.num_blocks

    def require_callable(self) -> None:
        """Refuse what every call here refuses, before the caller does something that it cannot take back.

        Raises:
            WrongThread: another thread owns the manager.
            Reentrancy: an event callback calls.
        """
        self._enter()

    def grow_pool(self, num_blocks: int) -> None:
        """Add free pages, so that there are `num_blocks`. There must be memory behind them.

        Raises:
            InvalidLength: fewer than there are, or more than the geometry has.
        """
        state = self._enter()
        pages = _as_end(num_blocks, state.pool.num_blocks, state.geometry.num_blocks)
        state.pool.apply_extend(pages)

    def shrink_pool(self, num_blocks: int) -> PoolShrinkRefused | None:
        """Take free pages away from the end, so that there are `num_blocks`. What they cached is forgotten.

        Returns:
            None when it is done, or what is in the way, with nothing changed.

        Raises:
            InvalidLength: more than there are, or not even the null page.
            StepOpen: a step is open, which may hand back what it took.
        """
        state = self._enter()
        pages = _as_end(num_blocks, state.geometry.first_page, state.pool.num_blocks)
        if state.step is not None:
            raise StepOpen(
                f"step {state.step.epoch} is open; commit it or roll it back, then shrink",
                epoch=state.step.epoch,
            )
        refused = _judge_shrink(state, pages)
        if refused is not None:
            return refused
        cached = [page for page in state.prefix.digest_of if page >= pages]
        return self._apply_leave(_apply_retract(state, pages, cached))


def _as_end(value: int, low: int, high: int) -> int:
    if not is_integer(value) or not low <= value <= high:
        raise InvalidLength(
            f"num_blocks is {value!r}; here it must be an integer in [{low}, {high}]",
            given=repr(value),
            minimum=low,
            maximum=high,
        )
    return int(value)


def _judge_shrink(state: KVState, num_blocks: int) -> PoolShrinkRefused | None:
    """Why the pages from `num_blocks` on cannot go."""
    pool, promised = state.pool, state.ledger.outstanding
    tail = pool.state[num_blocks : pool.num_blocks]
    live, fenced = int(np.count_nonzero(tail == LIVE)), int(np.count_nonzero(tail == FENCED))
    free = int(np.count_nonzero(tail < LIVE))
    if not live and not fenced and (not free or pool.num_available - free >= promised):
        return None
    used = np.flatnonzero((pool.state == LIVE) | (pool.state == FENCED))
    lowest = max(state.geometry.first_page, int(used[-1]) + 1 if len(used) else 0)
    spare = max(0, pool.num_available - promised)
    free_pages = np.flatnonzero((pool.state == CLEAN) | (pool.state == EVICTABLE))
    if spare < len(free_pages[free_pages >= lowest]):
        lowest = int(free_pages[len(free_pages) - spare - 1]) + 1
    return PoolShrinkRefused(num_blocks, lowest, live, fenced, promised)


def _apply_retract(state: KVState, num_blocks: int, cached: list[int]) -> PoolShrinkRefused | None:
    state.prefix.apply_forget(cached)
    state.pool.apply_retract(num_blocks)
    return None
