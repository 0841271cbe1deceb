"""The page authority: the only thing that allocates, shares and frees pages.

Every call is all or nothing: it either returns with everything done, or returns an outcome or raises a
typed error with nothing changed. Hot calls take arrays of rows. One thread owns the manager, and event
callbacks may not call it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count as counter

from .admission import AdmissionLedger
from .admission_calls import AdmissionCalls
from .block_pool import BlockPool
from .block_table import MAX_ROWS, TAG_MASK, BlockTable
from .events import EventLog, EventSink
from .geometry import INT32_MAX, PageGeometry, as_size
from .inspection import InspectionCalls
from .lifecycle import LifecycleCalls
from .pool_calls import PoolCalls
from .prefix_cache import PrefixCache
from .sharing import SharingCalls
from .state import KVState
from .step_calls import StepCalls
from .swap import HostPool
from .swap_calls import SwapCalls

DEFAULT_COLUMNS = 16_384

_tags = counter(1)


class KVCacheManager(
    StepCalls, LifecycleCalls, AdmissionCalls, SharingCalls, SwapCalls, PoolCalls, InspectionCalls
):
    """The page authority of one paged cache.

    Example:
        >>> kv = KVCacheManager(PageGeometry(num_blocks=8, block_size=16), max_sequences=4)
        >>> rows = kv.create(2)
        >>> with kv.begin_step(rows, [20, 1]) as step:
        ...     plan = step.plan()
        ...     step.commit()
        >>> plan.block_table.tolist()
        [[1, 2], [3, -1]]
        >>> kv.complete(step.epoch)
        >>> kv.release(rows)

    Args:
        geometry: the pool.
        max_sequences: rows.
        initial_blocks: pages that are there at first, the null page included; `grow_pool` adds more. None for
            all of the geometry's.
        max_blocks_per_sequence: columns: the longest context is this times the block size. None for as many
            as the pool has pages, but at most 16,384: every row takes that much table.
        watermark: pages that admission leaves free for running rows.
        max_preemptions: how often `resume` brings a sequence back without a promise of its whole length.
        host_blocks: host pages for swapping; 0 for none.
        verify_tokens: keep and compare what digests stand for, for a hash function with collisions.
        event_sinks: callables that are given every `KVCacheEvent`.
        storage: names the cache tensors, such as their address; a second live manager over the same storage
            is refused.

    Raises:
        InvalidGeometry: a size is out of range.
        StorageAlreadyOwned: another live manager owns `storage`.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        *,
        max_sequences: int = 256,
        initial_blocks: int | None = None,
        max_blocks_per_sequence: int | None = None,
        watermark: int = 0,
        max_preemptions: int = 3,
        host_blocks: int = 0,
        verify_tokens: bool = False,
        event_sinks: Sequence[EventSink] = (),
        storage: Hashable | None = None,
    ) -> None:
        columns = max_blocks_per_sequence
        if columns is None:
            columns = min(geometry.usable_blocks, DEFAULT_COLUMNS)
        rows = as_size("max_sequences", max_sequences, 1, MAX_ROWS)
        columns = as_size("max_blocks_per_sequence", columns, 1, INT32_MAX // geometry.block_size)
        ledger = AdmissionLedger(
            as_size("watermark", watermark, 0, geometry.usable_blocks - 1),
            as_size("max_preemptions", max_preemptions, 0, INT32_MAX),
        )
        host = HostPool(as_size("host_blocks", host_blocks, 0, INT32_MAX))
        blocks = geometry.num_blocks if initial_blocks is None else initial_blocks
        blocks = as_size("initial_blocks", blocks, geometry.first_page, geometry.num_blocks)
        pool, events = BlockPool(geometry, blocks), EventLog(list(event_sinks))
        state = KVState(
            geometry=geometry,
            pool=pool,
            table=BlockTable(rows, columns, next(_tags) & TAG_MASK),
            prefix=PrefixCache(pool, events, verify_tokens),
            ledger=ledger,
            host=host,
            events=events,
        )
        super().__init__(state, storage)
