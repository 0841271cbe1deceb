"""Moving a whole row's pages to the host and back.

The manager plans, the caller copies: a row is neither here nor there (SWAPPING) until the caller confirms.
Pages that others use never move.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .errors import SwapClosed
from .index_queue import IndexQueue

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class SwapPlan:
    """Copy page `device_pages[i]` to host page `host_pages[i]`, or back when `to_host` is false.

    Confirm with `KVCacheManager.confirm_swap` once the copies are done or stream-ordered before any later
    step, or take it back with `cancel_swap`.

    Attributes:
        handles: ``(rows,)`` int64, the rows on their way.
        device_pages: ``(pages,)`` int64.
        host_pages: ``(pages,)`` int64, page numbers of the host pool.
        to_host: the direction.
    """

    handles: Int64Array
    slots: Int64Array
    device_pages: Int64Array
    host_pages: Int64Array
    counts: Int64Array
    to_host: bool
    is_open: bool = field(default=True)

    def __post_init__(self) -> None:
        for array in (self.handles, self.slots, self.device_pages, self.host_pages, self.counts):
            array.flags.writeable = False  # the manager reads them again when the swap ends

    def require_open(self) -> None:
        """Refuse a swap that was already finished.

        Raises:
            SwapClosed: confirmed or cancelled before.
        """
        if not self.is_open:
            raise SwapClosed("the swap was already confirmed or cancelled", pages=len(self.device_pages))


@dataclass(slots=True)
class HostPool:
    """Host pages and which row holds them."""

    num_pages: int
    free: IndexQueue = field(init=False)
    held: dict[int, Int64Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = IndexQueue(self.num_pages)
        self.free.apply_push(np.arange(self.num_pages, dtype=np.int64))

    def apply_hold(self, plan: SwapPlan) -> None:
        """Note which host pages each row of a swap takes."""
        start = 0
        for slot, count in zip(plan.slots, plan.counts, strict=True):
            self.held[int(slot)] = plan.host_pages[start : start + int(count)]
            start += int(count)

    def apply_give_back(self, slot: int) -> None:
        """Free the host pages of a row."""
        self.free.apply_push(self.held.pop(slot))
