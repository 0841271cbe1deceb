"""Which full, committed page holds which content: digest to page and back.

Invariants: every registered page is full and immutable; a digest has one canonical page and perhaps
duplicates, which take its place in order when it goes; "stored" is told with the first page of a digest and
"removed" with the last. The cache holds no references: pages belong to rows and pins, and an unheld
registered page waits in the pool's evictable queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from operator import itemgetter
from typing import Self

import numpy as np
import numpy.typing as npt

from .block_pool import BlockPool
from .errors import HitClosed
from .events import EventLog
from .hashing import PrefixChain

Int64Array = npt.NDArray[np.int64]

MISS = -1


@dataclass(slots=True, eq=False)
class PagePins:
    """Pages that stay as they are until the pins are dropped. Use it as a context manager, or drop it.

    Attributes:
        pages: ``(pages,)`` int64 page ids.
        num_tokens: tokens that they hold.
        is_open: whether the pins still hold.
    """

    pages: Int64Array
    num_tokens: int
    _drop: Callable[[PagePins], None]
    is_open: bool = True

    def __post_init__(self) -> None:
        self.pages.flags.writeable = False  # the manager reads them again when the pins go

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_open:
            self.drop()

    def drop(self) -> None:
        """Take the pins away.

        Raises:
            HitClosed: attached or dropped before.
        """
        self._drop(self)

    def require_open(self) -> None:
        """Refuse pins that no longer hold.

        Raises:
            HitClosed: attached or dropped before.
        """
        if not self.is_open:
            raise HitClosed(
                "the pins were already attached or dropped; take new ones", tokens=self.num_tokens
            )


class PrefixHit(PagePins):
    """Pages that hold the front of a prompt, pinned until they are attached to a row or dropped.

    `num_tokens` is what need not be computed: whole blocks, and at most the prompt's length minus one.
    """

    __slots__ = ()


@dataclass(slots=True)
class PrefixCache:
    """The digest map of one pool.

    With `verify` the SHA-256 of the tokens behind a digest is kept and compared, so that a hash function with
    collisions can cost a hit but never give a wrong page.
    """

    pool: BlockPool
    events: EventLog
    verify: bool = False
    page_of: dict[bytes, int] = field(default_factory=dict)
    digest_of: dict[int, bytes] = field(default_factory=dict)
    duplicates: dict[bytes, list[int]] = field(default_factory=dict)
    histories: dict[bytes, bytes] = field(default_factory=dict)

    def find(self, chain: PrefixChain, limit: int) -> Int64Array:
        """The pages of the chain's first blocks, up to the first miss and at most `limit`."""
        digests = chain.digests if limit == len(chain.digests) else chain.digests[:limit]
        pages = self._pages_of(digests)
        return pages[: self._verified(chain, len(pages))] if self.verify else pages

    def _pages_of(self, digests: list[bytes]) -> Int64Array:
        if len(digests) > 1 and digests[-1] in self.page_of:
            with suppress(KeyError):  # most likely a full hit: one call for all digests is the fastest
                return np.fromiter(itemgetter(*digests)(self.page_of), dtype=np.int64, count=len(digests))
        found = map(self.page_of.get, digests, repeat(MISS))
        return np.fromiter(takewhile(MISS.__ne__, found), dtype=np.int64)

    def _verified(self, chain: PrefixChain, limit: int) -> int:
        pairs = zip(chain.digests[:limit], chain.histories, strict=False)
        return sum(1 for _ in takewhile(lambda pair: self.histories[pair[0]] == pair[1], pairs))

    def registrable_blocks(self, chain: PrefixChain, stop: int) -> int:
        """How many of the chain's first `stop` blocks may be registered.

        With `verify` that ends at a digest which stands for other tokens, in the map or in the chain itself.
        """
        if not self.verify:
            return stop
        mine: dict[bytes, bytes] = {}
        for block, (digest, history) in enumerate(zip(chain.digests[:stop], chain.histories, strict=False)):
            if self.histories.get(digest, mine.get(digest, history)) != history:
                return block
            mine[digest] = history
        return stop

    def apply_store(self, pages: Sequence[int], digests: Sequence[bytes], histories: Sequence[bytes]) -> None:
        """Register pages that are live, full and not registered."""
        for page, digest, history in zip(pages, digests, histories, strict=True):
            self.digest_of[page] = digest
            self.pool.apply_set_hashed(page, True)
            if digest in self.page_of:
                self.duplicates.setdefault(digest, []).append(page)
                continue
            self.page_of[digest] = page
            self.events.apply_record("stored", digest, page)
            if self.verify:
                self.histories[digest] = history

    def apply_forget(self, pages: Iterable[int]) -> None:
        """Drop the registrations of `pages`, whose content is about to change hands."""
        for page in pages:
            digest = self.digest_of.pop(page)
            self.pool.apply_set_hashed(page, False)
            others = self.duplicates.get(digest)
            if self.page_of[digest] != page:
                assert others is not None
                others.remove(page)
            elif others:
                self.page_of[digest] = others.pop(0)
            else:
                del self.page_of[digest]
                self.histories.pop(digest, None)
                self.events.apply_record("removed", digest, page)
            if others is not None and not others:
                self.duplicates.pop(digest, None)

    def apply_clear(self) -> None:
        """Drop every registration; held pages stay with their owners."""
        for page in list(self.digest_of):
            self.pool.apply_set_hashed(page, False)
        for index in (self.digest_of, self.page_of, self.duplicates, self.histories):
            index.clear()
        self.events.apply_record("cleared")
