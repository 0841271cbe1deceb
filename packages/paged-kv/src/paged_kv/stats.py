"""Counters that are maintained as things happen, and compared with a recount by `check`."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Tally:
    """Totals since construction that no other module counts."""

    steps: int = 0
    rollbacks: int = 0
    tokens: int = 0
    deferrals: int = 0
    unserviceable: int = 0
    admissions: int = 0
    releases: int = 0
    preemptions: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    forks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """A snapshot of one manager. Pages and tokens never share a field.

    ``num_pages_in_use`` are pages with a claim (state LIVE); ``num_pages_free`` can be given out now: clean
    and evictable. ``num_pages_uncommitted`` lie beyond the end of a pool that can grow. ``cacheable_tokens``
    is the granularity of prefix caching: a prompt shorter than this plus one token can never hit.
    """

    num_pages: int
    num_pages_in_use: int
    num_pages_free: int
    num_pages_clean: int
    num_pages_evictable: int
    num_pages_fenced: int
    num_pages_quarantined: int
    num_pages_uncommitted: int
    num_pages_shared: int
    num_pages_promised: int
    num_host_pages_free: int
    num_sequences: int
    cached_digests: int
    cacheable_tokens: int
    epochs_in_flight: int
    allocations_total: int
    frees_total: int
    revivals_total: int
    prefix_evictions_total: int
    copies_total: int
    steps_total: int
    rollbacks_total: int
    tokens_total: int
    deferrals_total: int
    unserviceable_total: int
    admissions_total: int
    releases_total: int
    preemptions_total: int
    swaps_out_total: int
    swaps_in_total: int
    forks_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    events_total: int
    sink_errors_total: int

    def prometheus(self, prefix: str = "paged_kv") -> str:
        """The snapshot in Prometheus' text format, one metric a field."""
        lines = []
        for item in fields(self):
            kind = "counter" if item.name.endswith("_total") else "gauge"
            name = f"{prefix}_{item.name}"
            lines += [f"# TYPE {name} {kind}", f"{name} {getattr(self, item.name)}"]
        return "\n".join(lines) + "\n"
