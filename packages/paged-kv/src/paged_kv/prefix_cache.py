"""Which full, committed page holds which content: digest to page and back.

Invariants: every registered page is full and immutable; a digest has one canonical page and perhaps
    duplicates, which take
its place in order when it goes; "stored" is told with the first page of a digest and "removed" with the last.
The cache
holds no references: pages belong to rows and pins, and an unheld registered page waits in the pool's
    evictable queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import numpy.typing as npt

from .block_pool import BlockPool
from .errors import HitClosed
from .events import EventLog
from .hashing import PrefixChain

Int64Array = npt.NDArray[np.int64]

MISS = -1


@dataclass(slots=True, eq=False)
class PrefixHit:
    """Pages that hold the front of a prompt, pinned until `KVCacheManager.attach` or `drop_hit`.

    Attributes:
        pages: ``(blocks,)`` int64 page ids.
        num_tokens: tokens that need no computing.
    """

    pages: Int64Array
    num_tokens: int
    is_open: bool = field(default=True)

    def require_open(self) -> None:
        """Refuse a hit whose pins were already used.

        Raises:
            HitClosed: attached or dropped before.
        """
        if not self.is_open:
            raise HitClosed(
                "the hit was already attached or dropped; look the prompt up again", tokens=self.num_tokens
            )


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The tokens of a block and the content in front of it; identity stands for the whole history."""

    tokens: bytes
    parent: Content | None


@dataclass(slots=True)
class PrefixCache:
    """The digest map of one pool.

    With `verify` the tokens behind a digest are kept and compared, so that a hash function with collisions
    can cost a hit but never give a wrong page.
    """

    pool: BlockPool
    events: EventLog
    verify: bool = False
    page_of: dict[bytes, int] = field(default_factory=dict)
    digest_of: dict[int, bytes] = field(default_factory=dict)
    duplicates: dict[bytes, list[int]] = field(default_factory=dict)
    contents: dict[bytes, Content] = field(default_factory=dict)

    def find(self, chain: PrefixChain, limit: int) -> Int64Array:
        """The pages of the chain's first blocks, up to the first miss and at most `limit`."""
        digests = chain.digests if limit == len(chain.digests) else chain.digests[:limit]
        pages = np.fromiter(map(self.page_of.get, digests, repeat(MISS)), dtype=np.int64, count=len(digests))
        if len(pages) and pages.min() == MISS:
            pages = pages[: int(np.argmax(pages == MISS))]
        return pages[: self._verified(chain, len(pages))] if self.verify else pages

    def _verified(self, chain: PrefixChain, limit: int) -> int:
        parent: Content | None = None
        for block in range(limit):
            content = self.contents[chain.digests[block]]
            if content.parent is not parent or content.tokens != chain.block_tokens(block):
                return block
            parent = content
        return limit

    def contents_for(self, chain: PrefixChain, stop: int) -> list[Content] | None:
        """The contents of the chain's first `stop` blocks, shared with what is registered; None without
        `verify`.

        Shorter than `stop` when a digest stands for other content: from there on nothing may be registered.
        """
        if not self.verify:
            return None
        found: list[Content] = []
        for block in range(stop):
            parent = found[-1] if found else None
            tokens, known = chain.block_tokens(block), self.contents.get(chain.digests[block])
            if known is None:
                known = next(
                    (c for d, c in zip(chain.digests, found, strict=False) if d == chain.digests[block]), None
                )
            if known is not None and (known.parent is not parent or known.tokens != tokens):
                break
            found.append(known or Content(tokens, parent))
        return found

    def apply_store(
        self, pages: Sequence[int], digests: Sequence[bytes], contents: Sequence[Content] | None
    ) -> None:
        """Register pages that are live, full and not registered."""
        for page, digest in zip(pages, digests, strict=True):
            self.digest_of[page] = digest
            self.pool.apply_set_hashed(page, True)
            if digest in self.page_of:
                self.duplicates.setdefault(digest, []).append(page)
                continue
            self.page_of[digest] = page
            self.events.apply_record("stored", digest, page)
        if contents is not None:
            for content, digest in zip(contents, digests, strict=True):
                self.contents[digest] = content

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
                self.contents.pop(digest, None)
                self.events.apply_record("removed", digest, page)
            if others is not None and not others:
                self.duplicates.pop(digest, None)

    def apply_clear(self) -> None:
        """Drop every registration; held pages stay with their owners."""
        for page in list(self.digest_of):
            self.pool.apply_set_hashed(page, False)
        for index in (self.digest_of, self.page_of, self.duplicates, self.contents):
            index.clear()
        self.events.apply_record("cleared")
