"""The manager's calls about who may start, and who has to give way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import lifecycle
from .admission import Request, admit
from .authority import Authority
from .block_pool import HELD, REF
from .errors import InvalidLength, InvalidTenant
from .outcomes import CapacityDeferred, UnserviceableRequest
from .prefix_cache import PrefixHit
from .requirements import require_tenant, require_window
from .vectors import IntVector, as_any_lengths, as_count, as_lengths

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PreemptedSequence:
    """What is left of a row that gave way: enough to bring it back with `KVCacheManager.resume`.

    Attributes:
        num_tokens: tokens that it had, all to be computed again but for what the prefix cache still holds.
        preemptions: how often this sequence gave way so far.
        window: its sliding window.
        tenant: whose quota it counts for.
    """

    num_tokens: int
    preemptions: int
    window: int
    tenant: str | None


class AdmissionCalls(Authority):
    """Admission, quotas, preemption by recompute."""

    def admit(
        self,
        total_lens: IntVector | int,
        *,
        promise_lens: IntVector | int | None = None,
        tenant: str | None = None,
        window: int = 0,
        hits: Sequence[PrefixHit | None] | None = None,
    ) -> Int64Array | CapacityDeferred | UnserviceableRequest:
        """Open one sequence for each total length, if every page that they will need can be promised now.

        Whoever is admitted can finish: later admissions, and rows without a promise, only get what is left
        beyond it.

        Args:
            total_lens: prompt plus output tokens of each sequence; a single integer opens one.
            promise_lens: promise only so many tokens (optimistic: the row may have to be preempted); None for
                the whole length.
            tenant: whose quota the sequences count for.
            window: sliding window in tokens; 0 for none.
            hits: prefix hits to attach, one a sequence or None; they stay open unless the sequences are
                admitted.

        Returns:
            int64 handles; or `CapacityDeferred`; or `UnserviceableRequest` when no amount of waiting helps.

        Raises:
            InvalidLength, InvalidWindow, InvalidTenant: bad arguments.
            HitClosed, ForeignClaim: a hit was used before, or is none of this manager's.
        """
        state = self._enter()
        totals = as_any_lengths(total_lens, "total_lens")
        promises = totals if promise_lens is None else as_lengths(promise_lens, len(totals), "promise_lens")
        require_window(window, 0)
        require_tenant(tenant)
        request = Request(totals, np.minimum(promises, totals), tenant, window, _no_preemptions(totals), hits)
        return self._apply_leave(admit(state, request))

    def set_quota(self, tenant: str, pages: int | None) -> None:
        """Limit the pages of `tenant`, promised ones included; None lifts it. Rows keep what they have.

        Raises:
            InvalidLength: not a non-negative integer.
            InvalidTenant: not a string.
        """
        state = self._enter()
        if tenant is None:
            raise InvalidTenant("a quota needs a tenant's name", tenant=None)
        require_tenant(tenant)
        limit = None if pages is None else int(as_lengths(pages, 1, "pages")[0])
        state.ledger.apply_quota(tenant, limit)

    def preempt(self, rows: IntVector | int) -> list[PreemptedSequence]:
        """Make rows give way: release their pages, to be computed again later.

        Registered pages stay as cached content while nobody needs them, so coming back is a prefix hit.

        Returns:
            What `resume` needs, one a row.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest, RowBusy: bad rows.
        """
        state = self._enter()
        slots = self._rows(rows)
        table, names = state.table, [*state.ledger.names, None]
        left = [
            PreemptedSequence(
                int(table.seq_len[slot]),
                int(table.preemptions[slot]) + 1,
                int(table.window[slot]),
                names[int(table.tenant[slot])],
            )
            for slot in slots
        ]
        return lifecycle.release(state, slots, left, preempted=True)

    def resume(
        self, sequence: PreemptedSequence, total_len: int, hit: PrefixHit | None = None
    ) -> Int64Array | CapacityDeferred | UnserviceableRequest:
        """Bring a preempted sequence back as a new row.

        The first `max_preemptions` times it is promised only what it had and one token more; after that the
        whole of `total_len`, so that it cannot be preempted for ever.

        Raises:
            InvalidLength: `total_len` is less than what the sequence had.
            InvalidWindow, InvalidTenant: the sequence is not one that `preempt` returned.
            HitClosed, ForeignClaim: the hit was used before, or is none of this manager's.
        """
        state = self._enter()
        totals = as_lengths(total_len, 1, "total_len")
        require_window(sequence.window, 0)
        require_tenant(sequence.tenant)
        num_tokens = as_count(sequence.num_tokens, "num_tokens")
        counts = as_lengths(sequence.preemptions, 1, "preemptions")
        if num_tokens > totals[0]:
            raise InvalidLength(
                f"the sequence had {num_tokens} tokens; its total cannot be {int(totals[0])}",
                given=int(totals[0]),
                minimum=num_tokens,
            )
        optimistic = sequence.preemptions <= state.ledger.max_preemptions
        promises = np.minimum(totals, num_tokens + 1) if optimistic else totals
        request = Request(totals, promises, sequence.tenant, sequence.window, counts, [hit])
        return self._apply_leave(admit(state, request))

    def reclaimable_pages(self, rows: IntVector | int) -> Int64Array:
        """How many pages the release of each row alone would free: those that nobody else holds.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest: bad rows.
        """
        state = self._enter()
        slots = self._rows(rows)
        table = state.table
        cells, batch = table.span(slots, table.first_block[slots], table.n_blocks[slots])
        alone = (state.pool.claims[table.flat[cells]] & HELD) == REF
        return np.bincount(batch[alone], minlength=len(slots)).astype(np.int64)


def _no_preemptions(totals: Int64Array) -> Int64Array:
    return np.zeros(len(totals), dtype=np.int64)
