"""The state of every page, and the only code that writes it.

One 64-bit word a page says who claims it: references from table cells in the low half, pins in the high
half, and one bit when a digest is registered for its content. So "may this row write here" is
``claims[page] == REF`` and "does anyone hold it" is ``claims[page] & HELD``.

    CLEAN ──take──► LIVE ──last claim──► FENCED(epoch) ──complete──► EVICTABLE (registered) or CLEAN
    EVICTABLE or registered FENCED ──pin──► LIVE        EVICTABLE ──take (registration dropped)──► LIVE
    any ──storage fault──► QUARANTINED, for good          UNCOMMITTED ◄──shrink / grow──► CLEAN

Clean pages leave before evictable ones, each queue first in, first out. A page that is given back while a
step is in flight waits behind that step's epoch: the device may still read it. Functions named ``apply_…``
only assign: whatever could fail was done before them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import PageDoubleFree, PinUnderflow
from .geometry import PageGeometry
from .index_queue import IndexQueue

Int64Array = npt.NDArray[np.int64]

REF = 1
PIN = 1 << 32
HASHED = 1 << 62
REF_MASK = PIN - 1
HELD = HASHED - 1

NULL, CLEAN, EVICTABLE, LIVE, FENCED, QUARANTINED, UNCOMMITTED = range(7)
STATE_NAMES = ("null", "clean", "evictable", "live", "fenced", "quarantined", "uncommitted")


class PageChoice(NamedTuple):
    """Pages that `BlockPool.choose` picked and nobody owns yet."""

    pages: Int64Array
    num_clean: int
    clean_head: int
    evictable_head: int

    @property
    def evicted(self) -> Int64Array:
        """The picked pages whose cached content is lost."""
        return self.pages[self.num_clean :]


@dataclass(slots=True)
class PoolCounters:
    """Totals since construction, maintained as they happen."""

    allocations: int = 0
    frees: int = 0
    revivals: int = 0
    evictions: int = 0
    copies: int = 0


@dataclass(slots=True)
class BlockPool:
    """Claims, states and queues of the pages of one geometry, of which the first `num_blocks` are there."""

    geometry: PageGeometry
    num_blocks: int
    claims: Int64Array = field(init=False)
    state: npt.NDArray[np.uint8] = field(init=False)
    fence_epoch: Int64Array = field(init=False)
    clean: IndexQueue = field(init=False)
    evictable: IndexQueue = field(init=False)
    fence: deque[tuple[int, Int64Array]] = field(init=False, default_factory=deque)
    num_live: int = field(init=False, default=0)
    num_fenced: int = field(init=False, default=0)
    num_quarantined: int = field(init=False, default=0)
    _num_shared: int = field(init=False, default=0)
    _shared_is_stale: bool = field(init=False, default=False)
    counters: PoolCounters = field(init=False, default_factory=PoolCounters)
    _scratch: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        size = self.geometry.num_blocks
        self.claims = np.zeros(size, dtype=np.int64)
        self.state = np.full(size, UNCOMMITTED, dtype=np.uint8)
        self.state[: self.num_blocks] = CLEAN
        self.state[: self.geometry.first_page] = NULL
        self.fence_epoch = np.zeros(size, dtype=np.int64)
        self._scratch = np.zeros(size, dtype=np.int64)
        self.clean = IndexQueue(size)
        self.clean.apply_push(np.arange(self.geometry.first_page, self.num_blocks, dtype=np.int64))
        self.evictable = IndexQueue(size)

    @property
    def num_available(self) -> int:
        """Pages that can be taken now."""
        return self.clean.count + self.evictable.count

    @property
    def num_usable(self) -> int:
        """Pages that could ever be taken: neither the null page nor quarantined; uncommitted ones count."""
        return self.geometry.usable_blocks - self.num_quarantined

    @property
    def num_shared(self) -> int:
        """Pages with more than one reference; counted again when sharing changed since the last time."""
        if self._shared_is_stale:
            self._num_shared = int(np.count_nonzero((self.claims & REF_MASK) > 1))
            self._shared_is_stale = False
        return self._num_shared

    def choose(self, count: int) -> PageChoice:
        """Pick the next `count` pages without taking them; `count` is at most `num_available`."""
        num_clean = min(count, self.clean.count)
        pages, clean_head = self.clean.peek(num_clean)
        if num_clean == count:
            return PageChoice(pages, num_clean, clean_head, -1)
        evicted, evictable_head = self.evictable.peek(count - num_clean)
        return PageChoice(np.concatenate((pages, evicted)), num_clean, clean_head, evictable_head)

    def apply_take(self, choice: PageChoice) -> None:
        """Give the chosen pages one reference each. Registrations of the evicted ones were dropped before."""
        pages, count = choice.pages, len(choice.pages)
        self.clean.apply_take(choice.num_clean, choice.clean_head)
        if count > choice.num_clean:
            self.evictable.apply_take(count - choice.num_clean, choice.evictable_head)
            self.counters.evictions += count - choice.num_clean
        self.claims[pages] = REF
        self.state[pages] = LIVE
        self.num_live += count
        self.counters.allocations += count

    def apply_share(self, pages: Int64Array, times: int = 1) -> None:
        """Add `times` references to each of `pages`, which are distinct; free ones come back to life."""
        self._apply_revive(pages)
        self.apply_share_live(pages, times)

    def apply_share_live(self, pages: Int64Array, times: int) -> None:
        """As `apply_share`, for pages that a row already holds."""
        np.add.at(self.claims, pages, times * REF)
        self._shared_is_stale = True

    def apply_pin(self, pages: Int64Array) -> None:
        """Add a pin to each of `pages`, which are distinct."""
        self._apply_revive(pages)
        np.add.at(self.claims, pages, PIN)

    def require_refs(self, pages: Int64Array) -> None:
        """Refuse to give back a page that is not live.

        Raises:
            PageDoubleFree: a page has no reference.
        """
        held = (self.claims[pages] & REF_MASK) > 0
        if not held.all():
            bad = pages[~held]
            raise PageDoubleFree(
                f"page {int(bad[0])} is given back but has no reference ({len(bad)} such pages)",
                page=int(bad[0]),
                count=len(bad),
            )

    def require_pins(self, pages: Int64Array) -> None:
        """Refuse to unpin a page that has no pin.

        Raises:
            PinUnderflow: a page has no open pin.
        """
        pinned = (self.claims[pages] & HELD) >= PIN
        if not pinned.all():
            bad = pages[~pinned]
            raise PinUnderflow(
                f"page {int(bad[0])} is unpinned but has no pin", page=int(bad[0]), count=len(bad)
            )

    def apply_drop(self, pages: Int64Array, epoch: int) -> None:
        """Take back one reference a listed page (a page may be listed more than once).

        Pages without a claim left wait for `epoch`, or are free at once when `epoch` is 0. They queue in the
        listed order, so list a row's pages tail first: then a cached chain loses its leaves first.
        """
        np.subtract.at(self.claims, pages, REF)
        self._shared_is_stale |= self._num_shared > 0
        self._apply_retire(pages, epoch)

    def apply_unpin(self, pages: Int64Array, epoch: int) -> None:
        """Take back one pin a listed page, as `apply_drop` does with references."""
        np.subtract.at(self.claims, pages, PIN)
        self._apply_retire(pages, epoch)

    def apply_transfer_pins(self, pages: Int64Array) -> None:
        """Turn one pin of each page into a reference."""
        np.add.at(self.claims, pages, REF - PIN)
        self._shared_is_stale = True

    def apply_complete(self, epoch: int) -> None:
        """Free what waited for epochs up to `epoch`."""
        while self.fence and self.fence[0][0] <= epoch:
            waited, pages = self.fence.popleft()
            still = (self.state[pages] == FENCED) & (self.fence_epoch[pages] == waited)
            pages = pages[still]
            pages = pages[self._last_occurrences(pages)]
            self.num_fenced -= len(pages)
            self._apply_free(pages)

    def apply_refence(self, epoch: int, earlier: int) -> None:
        """Let what waits for `epoch`, which never ran, wait for `earlier` instead (0: free at once)."""
        moved = [pages for waited, pages in self.fence if waited == epoch]
        self.fence = deque(entry for entry in self.fence if entry[0] != epoch)
        for pages in moved:
            still = (self.state[pages] == FENCED) & (self.fence_epoch[pages] == epoch)
            pages = pages[still]
            pages = pages[self._last_occurrences(pages)]
            if earlier:
                self.fence_epoch[pages] = earlier
                self.fence.append((earlier, pages))
            else:
                self.num_fenced -= len(pages)
                self._apply_free(pages)

    def apply_set_hashed(self, page: int, hashed: bool) -> None:
        """Set or clear the digest bit of `page`; a free page moves to the queue that it then belongs to."""
        if hashed:
            self.claims[page] |= HASHED
            return
        self.claims[page] &= ~HASHED
        if self.state[page] == EVICTABLE:
            one = np.array([page], dtype=np.int64)
            self.evictable.apply_remove(one)
            self._apply_free(one)

    def apply_extend(self, num_blocks: int) -> None:
        """Let the pages up to `num_blocks` be there; quarantined ones stay so."""
        pages = np.arange(self.num_blocks, num_blocks, dtype=np.int64)
        pages = pages[self.state[pages] == UNCOMMITTED]
        self.num_blocks = num_blocks
        self._apply_queue(pages, CLEAN, self.clean)

    def apply_retract(self, num_blocks: int) -> None:
        """Take away the pages from `num_blocks` on, all of which are clean or quarantined."""
        pages = np.arange(num_blocks, self.num_blocks, dtype=np.int64)
        pages = pages[self.state[pages] == CLEAN]
        self.num_blocks = num_blocks
        self.clean.apply_remove(pages)
        self.state[pages] = UNCOMMITTED

    def apply_quarantine(self, page: int) -> None:
        """Take a page that nobody holds out of service for good."""
        one = np.array([page], dtype=np.int64)
        if self.state[page] == CLEAN:
            self.clean.apply_remove(one)
        elif self.state[page] == FENCED:
            self.num_fenced -= 1
        self.claims[page] = 0
        self.state[page] = QUARANTINED
        self.num_quarantined += 1

    def _apply_revive(self, pages: Int64Array) -> None:
        states = self.state[pages]
        num_live = int(np.count_nonzero(states == LIVE))
        if num_live == len(pages):
            return
        evictable = states == EVICTABLE
        num_evictable = int(np.count_nonzero(evictable))
        revived = len(pages) - num_live
        self.evictable.apply_remove(pages if num_evictable == len(pages) else pages[evictable])
        self.num_fenced -= revived - num_evictable
        self.num_live += revived
        self.counters.revivals += revived
        self.state[pages] = LIVE

    def _apply_retire(self, pages: Int64Array, epoch: int) -> None:
        unheld = pages[(self.claims[pages] & HELD) == 0]
        if not len(unheld):
            return
        unheld = unheld[self._last_occurrences(unheld)]
        count = len(unheld)
        self.num_live -= count
        self.counters.frees += count
        if epoch:
            self.state[unheld] = FENCED
            self.fence_epoch[unheld] = epoch
            self.num_fenced += count
            self.fence.append((epoch, unheld))
        else:
            self._apply_free(unheld)

    def _apply_free(self, pages: Int64Array) -> None:
        hashed = self.claims[pages] != 0
        if hashed.any():
            self._apply_queue(pages[~hashed], CLEAN, self.clean)
            self._apply_queue(pages[hashed], EVICTABLE, self.evictable)
        else:
            self._apply_queue(pages, CLEAN, self.clean)

    def _apply_queue(self, pages: Int64Array, state: int, queue: IndexQueue) -> None:
        self.state[pages] = state
        queue.apply_push(pages)

    def _last_occurrences(self, pages: Int64Array) -> npt.NDArray[np.bool_]:
        order = np.arange(len(pages))
        self._scratch[pages] = order
        return np.equal(self._scratch[pages], order)
