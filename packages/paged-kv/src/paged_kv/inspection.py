"""The manager's calls that look and do not touch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from . import invariants
from .authority import Authority
from .errors import KvConfigError
from .events import EventSink
from .stats import KVCacheStats


class InspectionCalls(Authority):
    """Statistics, invariants, events."""

    def stats(self) -> KVCacheStats:
        """A snapshot of the maintained counters.

        Costs the same for any pool, but for one pass over the pages when sharing changed since the last one.
        """
        state = self._enter()
        pool, epochs = state.pool, state.epochs
        return KVCacheStats(
            num_pages=state.geometry.num_blocks,
            num_pages_in_use=pool.num_live,
            num_pages_free=pool.num_available,
            num_pages_clean=pool.clean.count,
            num_pages_evictable=pool.evictable.count,
            num_pages_fenced=pool.num_fenced,
            num_pages_quarantined=pool.num_quarantined,
            num_pages_uncommitted=state.geometry.num_blocks - pool.num_blocks,
            num_pages_shared=pool.num_shared,
            num_pages_promised=state.ledger.outstanding,
            num_host_pages_free=state.host.free.count,
            num_sequences=state.table.num_used,
            cached_digests=len(state.prefix.page_of),
            cacheable_tokens=state.geometry.block_size,
            epochs_in_flight=epochs.launched - epochs.completed,
            allocations_total=pool.counters.allocations,
            frees_total=pool.counters.frees,
            revivals_total=pool.counters.revivals,
            prefix_evictions_total=pool.counters.evictions,
            copies_total=pool.counters.copies,
            events_total=state.events.num_events,
            sink_errors_total=state.events.num_sink_errors,
            **{f"{name}_total": value for name, value in asdict(state.tally).items()},
        )

    def check(self, level: Literal["fast", "full"] = "fast") -> None:
        """Verify the invariants: "fast" looks at every page and row, "full" at every table cell too.

        Raises:
            InvariantViolation: with the invariant's name and the first offenders.
            KvConfigError: there is no such level.
        """
        if level not in ("fast", "full"):
            raise KvConfigError(f"level is {level!r}; it must be 'fast' or 'full'", level=level)
        state = self._enter()
        invariants.check_full(state) if level == "full" else invariants.check_fast(state)

    def digest(self) -> str:
        """A hash of the whole state: equal before and after anything that must not change it. For tests."""
        return invariants.digest(self._enter())

    def add_event_sink(self, sink: EventSink) -> None:
        """Tell `sink` every later event. It must not call the manager."""
        self._enter().events.sinks.append(sink)

    @property
    def sink_errors(self) -> tuple[Exception, ...]:
        """The last exceptions that event sinks raised."""
        return tuple(self._state.events.sink_errors)
