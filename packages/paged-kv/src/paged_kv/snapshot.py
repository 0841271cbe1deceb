"""Reading the counters of a manager into `KVCacheStats`."""

from __future__ import annotations

from dataclasses import asdict

from .state import KVState
from .stats import KVCacheStats


def snapshot(state: KVState) -> KVCacheStats:
    """The current counters; no page or row is looked at."""
    pool, epochs = state.pool, state.epochs
    return KVCacheStats(
        num_pages=state.geometry.num_blocks,
        num_pages_in_use=pool.num_live,
        num_pages_free=pool.num_available,
        num_pages_clean=pool.clean.count,
        num_pages_evictable=pool.evictable.count,
        num_pages_fenced=pool.num_fenced,
        num_pages_quarantined=pool.num_quarantined,
        num_pages_shared=pool.num_shared,
        num_pages_promised=state.ledger.outstanding,
        num_host_pages_free=state.host.free.count,
        num_sequences=state.table.num_used,
        cached_digests=len(state.prefix.page_of),
        cacheable_tokens=state.geometry.block_size,
        epochs_in_flight=epochs.launched - epochs.completed,
        allocations_total=pool.counters.allocations,
        frees_total=pool.counters.frees,
        prefix_evictions_total=pool.counters.evictions,
        copies_total=pool.counters.copies,
        events_total=state.events.num_events,
        sink_errors_total=state.events.num_sink_errors,
        **{f"{name}_total": value for name, value in asdict(state.tally).items()},
    )
