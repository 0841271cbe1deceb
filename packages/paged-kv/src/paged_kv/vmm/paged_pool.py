"""A page pool whose memory comes and goes while its pages stay where they are.

The cache tensors are reserved for the largest pool; granules are committed for the pages that are there. A
page becomes free only after the memory behind it is committed, and memory is taken away only after its pages
left the pool. New memory is zero; a page whose granule stayed mapped holds what it held, like any page that
somebody had before. The block ids, the tensors' addresses and every captured graph stay good.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_kv.errors import CommitOutOfRange, InvalidGeometry, KvError
from paged_kv.geometry import PageGeometry, as_size
from paged_kv.manager import KVCacheManager
from paged_kv.outcomes import PoolShrinkRefused

from .commit import CommitOutcome
from .decommit import DecommitOutcome
from .geometry import MAX_LAYERS, BindingGeometry, KvCacheGeometry, KvLayout
from .ledger import AdmissionRefused
from .storage import MappedStorage


@dataclass(frozen=True, slots=True)
class PoolResized:
    """One growth or shrinking of a pool.

    Attributes:
        old: pages before, the null page included.
        new: pages now.
        memory: what was committed or given back for it.
    """

    old: int
    new: int
    memory: CommitOutcome | DecommitOutcome


def paged_cache_geometry(
    pages: PageGeometry, *, layers: int, kv_heads: int, head_dim: int, element_size: int = 2, tensors: int = 2
) -> KvCacheGeometry:
    """The cache tensors ``(num_blocks, block_size, kv_heads, head_dim)`` of a paged model, `tensors` a layer.

    For LATENT caches `kv_heads` and `tensors` are 1 and `head_dim` is the latent width.

    Example:
        >>> mla = paged_cache_geometry(
        ...     PageGeometry(1_024, 64), layers=27, kv_heads=1, head_dim=576, tensors=1)
        >>> len(mla.bindings), mla.bindings[0].reserved_bytes
        (27, 75497472)
    """
    binding = BindingGeometry(KvLayout.SEQ_MAJOR, pages.num_slots, kv_heads, head_dim, element_size)
    return KvCacheGeometry(
        (binding,) * (as_size("layers", layers, 1, MAX_LAYERS) * as_size("tensors", tensors, 1, 8))
    )


class PagedPool:
    """Joins the page authority to the memory behind its pages. Called by the authority's thread.

    Args:
        manager: built with ``initial_blocks=geometry.first_page``: no page is free, and the null page must
            not be read, before the first `grow`.
        storage: its SEQ_MAJOR tensors, reserved for the largest pool; see `paged_cache_geometry`.

    Raises:
        InvalidGeometry: the tensors are not those of the manager's pages, or pages are there without memory.
    """

    def __init__(self, manager: KVCacheManager, storage: MappedStorage) -> None:
        pages = manager.geometry
        wrong = [
            binding
            for binding in storage.geometry.bindings
            if binding.layout is not KvLayout.SEQ_MAJOR
            or binding.batch != 1
            or binding.capacity != pages.num_slots
        ]
        if wrong:
            raise InvalidGeometry(
                f"{len(wrong)} tensors are not SEQ_MAJOR ones of {pages.num_slots} tokens; "
                "paged_cache_geometry makes the right ones",
                count=len(wrong),
                expected=pages.num_slots,
            )
        if manager.pool_blocks > pages.first_page:
            raise InvalidGeometry(
                f"the manager has {manager.pool_blocks} pages and no memory is behind them; build it with "
                f"initial_blocks={pages.first_page}",
                given=manager.pool_blocks,
                expected=pages.first_page,
            )
        self.manager, self.storage = manager, storage

    @property
    def num_blocks(self) -> int:
        """Pages that are there, the null page included."""
        return self.manager.pool_blocks

    def grow(self, num_blocks: int, *, stream: int = 0) -> PoolResized | AdmissionRefused:
        """Let there be `num_blocks` pages: commit, then show them.

        Args:
            num_blocks: the null page included; at most the geometry's.
            stream: the stream that writes to the cache; memory that is new is zero in its order.

        Returns:
            What was done, or why there may not be so much memory, with nothing changed.

        Raises:
            CommitOutOfRange: more than are reserved, or fewer than there are.
            CaptureInProgress, GrantOpen, RangeQuarantined, DriverCallFailed: see `VirtualArena.commit`; no
                page became visible.
            WrongThread, Reentrancy: see `KVCacheManager`.
        """
        old = self.manager.pool_blocks
        self._require_pages(num_blocks, old)
        self.manager.require_callable()
        memory = self._commit(num_blocks, stream)
        if isinstance(memory, AdmissionRefused):
            return memory
        if not memory.billed_bytes:
            self.storage.arena.wait_ready(stream)  # committed ahead, perhaps on another stream
        self.manager.grow_pool(num_blocks)
        return PoolResized(old, int(num_blocks), memory)

    def commit_ahead(self, num_blocks: int, *, stream: int = 0) -> CommitOutcome | AdmissionRefused:
        """Commit memory for `num_blocks` pages and show none; any thread, and a stream of its own.

        The growth that comes to it maps nothing. A shrinking takes it back.

        Raises:
            CommitOutOfRange: more than are reserved.
            CaptureInProgress, GrantOpen, RangeQuarantined, DriverCallFailed: see `VirtualArena.commit`.
        """
        self._require_pages(num_blocks, 0)
        return self._commit(num_blocks, stream)

    def shrink(self, num_blocks: int) -> PoolResized | PoolShrinkRefused:
        """Keep `num_blocks` pages, if those beyond are free, and give their memory back.

        Returns:
            What was done, or which pages are in the way, with nothing changed.

        Raises:
            InvalidLength: more pages than there are, or not even the null page.
            StepOpen: a step is open.
            CaptureInProgress, WorkInFlight: not now; nothing was changed.
            WrongThread, Reentrancy: see `KVCacheManager`.
        """
        old = self.manager.pool_blocks
        self.storage.gate.require_not_capturing()
        self.storage.arena.require_idle()
        refused = self.manager.shrink_pool(num_blocks)
        if refused is not None:
            return refused
        try:
            memory = self.storage.shrink(int(num_blocks) * self.manager.geometry.block_size)
        except KvError:  # nothing was unmapped; after an interrupt something may be, and the pages stay away
            self.manager.grow_pool(old)
            raise
        return PoolResized(old, int(num_blocks), memory)

    def close(self) -> None:
        """Give all memory back. The manager must not be used with this cache any more."""
        self.storage.close()

    def _commit(self, num_blocks: int, stream: int) -> CommitOutcome | AdmissionRefused:
        return self.storage.commit(int(num_blocks) * self.manager.geometry.block_size, stream)

    def _require_pages(self, num_blocks: int, least: int) -> None:
        most = self.manager.geometry.num_blocks
        if as_size("num_blocks", num_blocks, 0, 1 << 31) > most or num_blocks < least:
            raise CommitOutOfRange(
                f"{num_blocks} pages asked for; the pool has {least} and {most} are reserved",
                needed=int(num_blocks),
                minimum=least,
                maximum=most,
            )
