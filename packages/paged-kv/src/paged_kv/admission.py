"""Promises: who may still take how many pages.

An admitted row is promised every page of its whole length, so that whoever starts can finish. `outstanding`
is the sum of what is promised and not yet taken; a row without a promise may only take what is left beyond
it. A tenant with a quota is charged the larger of what its rows were promised and what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .block_table import BlockTable
from .errors import HitClosed, InvalidLength
from .outcomes import CapacityDeferred, UnserviceableRequest

if TYPE_CHECKING:
    from .prefix_cache import PrefixHit
    from .state import KVState

Int64Array = npt.NDArray[np.int64]

NO_TENANT = -1


@dataclass(slots=True)
class AdmissionLedger:
    """Promised pages and tenants' charges.

    Attributes:
        watermark: pages that admission leaves free, so that running rows can grow.
        max_preemptions: after so many a sequence comes back with a promise of its whole length.
        outstanding: promised pages that their rows have not taken yet.
        quotas: the most pages of a tenant, by its number.
        used: pages charged to a tenant, by its number.
        names: tenant names, by number.
    """

    watermark: int = 0
    max_preemptions: int = 3
    outstanding: int = 0
    quotas: dict[int, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def tenant_number(self, name: str | None) -> int:
        """The number of tenant `name`, `len(names)` for a new one; -1 for none."""
        if name is None:
            return NO_TENANT
        return self.names.index(name) if name in self.names else len(self.names)

    def apply_know(self, name: str | None) -> None:
        """Remember a tenant's name."""
        if name is not None and name not in self.names:
            self.names.append(name)

    def apply_quota(self, name: str, pages: int | None) -> None:
        """Set or lift a tenant's limit."""
        self.apply_know(name)
        number = self.tenant_number(name)
        if pages is None:
            self.quotas.pop(number, None)
        else:
            self.quotas[number] = pages

    def over_quota(self, tenant: int, extra: int) -> CapacityDeferred | None:
        """A deferral when `extra` pages more would pass the tenant's quota."""
        quota = self.quotas.get(tenant)
        if quota is None:
            return None
        left = max(0, quota - self.used.get(tenant, 0))
        return None if extra <= left else CapacityDeferred(extra, left, left, "quota")

    def batch_over_quota(
        self, tenants: Int64Array, before: Int64Array, after: Int64Array
    ) -> CapacityDeferred | UnserviceableRequest | None:
        """Whether rows whose charges grow from `before` to `after` pass a quota, now or each by itself."""
        for tenant, quota in self.quotas.items():
            mine = (tenants == tenant) & (after > before)
            if not mine.any():
                continue
            most = int(after[mine].max())
            if most > quota:
                return UnserviceableRequest(most, quota, "quota")
            refusal = self.over_quota(tenant, int((after - before)[mine].sum()))
            if refusal is not None:
                return refusal
        return None

    def apply_charge(self, tenants: Int64Array, extra: Int64Array) -> None:
        """Charge `extra` pages (negative to give back) to each row's tenant."""
        if not self.names:
            return
        for tenant in np.unique(tenants[tenants != NO_TENANT]):
            number = int(tenant)
            self.used[number] = self.used.get(number, 0) + int(extra[tenants == tenant].sum())


def future_need(table: BlockTable, slots: Int64Array) -> Int64Array:
    """Pages promised to each row and not yet taken."""
    return np.asarray(np.maximum(table.promised[slots] - table.n_blocks[slots], 0), dtype=np.int64)


def charges(table: BlockTable, slots: Int64Array) -> Int64Array:
    """Pages that each row counts for in its tenant's quota."""
    return np.asarray(np.maximum(table.promised[slots], table.n_blocks[slots]), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Sequences that ask to start together."""

    totals: Int64Array
    promises: Int64Array
    tenant: str | None
    window: int
    preemptions: Int64Array
    hits: Sequence[PrefixHit | None] | None


def admit(state: KVState, request: Request) -> Int64Array | CapacityDeferred | UnserviceableRequest:
    """Open rows with a promise; see `KVCacheManager.admit`."""
    table, ledger = state.table, state.ledger
    hits = _open_hits(state, request.hits, request.totals)
    hit_blocks = np.zeros(len(request.totals), dtype=np.int64)
    for index, hit in hits:
        hit_blocks[index] = len(hit.pages)
    totals = _blocks(state, request.totals)
    promised = np.maximum(_blocks(state, request.promises), hit_blocks)
    charge, needed = int(promised.sum()), int((promised - hit_blocks).sum())
    never = _never(state, request, totals, needed, charge)
    if never is not None:
        return never
    if len(totals) > table.free.count:
        return CapacityDeferred(len(totals), table.free.count, table.free.count, "rows")
    later = _later(state, needed, int(hit_blocks.sum())) or ledger.over_quota(
        ledger.tenant_number(request.tenant), charge
    )
    if later is not None:
        return later
    slots, head = table.choose_rows(len(totals))
    handles = table.next_handles(slots)
    return _apply_admit(state, request, slots, head, handles, promised, needed, hits)


def _blocks(state: KVState, lengths: Int64Array) -> Int64Array:
    return np.asarray((lengths + state.geometry.block_size - 1) >> state.geometry.block_shift)


def _never(
    state: KVState, request: Request, totals: Int64Array, needed: int, charge: int
) -> UnserviceableRequest | None:
    """Why no amount of waiting helps, if so."""
    table, ledger = state.table, state.ledger
    widest, count = int(totals.max()) if len(totals) else 0, len(totals)
    usable = state.pool.num_usable - ledger.watermark
    if max(widest, needed) > usable:
        reason = "watermark" if max(widest, needed) <= state.pool.num_usable else "pages"
        return UnserviceableRequest(max(widest, needed), usable, reason)
    if widest > table.num_columns:
        return UnserviceableRequest(widest, table.num_columns, "columns")
    if count > table.num_rows:
        return UnserviceableRequest(count, table.num_rows, "rows")
    quota = ledger.quotas.get(ledger.tenant_number(request.tenant))
    if quota is not None and max(charge, widest) > quota:
        return UnserviceableRequest(max(charge, widest), quota, "quota")
    return None


def _later(state: KVState, needed: int, hit: int) -> CapacityDeferred | None:
    """Why waiting can help, if so: pages are promised to others, those of the hits perhaps included."""
    free = state.pool.num_available - state.ledger.outstanding
    room = free - state.ledger.watermark
    if needed <= max(0, room) and not (hit and free < 0):
        return None
    reason = "watermark" if needed <= free else "pages"
    return CapacityDeferred(needed, max(0, room), max(0, room + state.pool.num_fenced), reason)


def _open_hits(
    state: KVState, hits: Sequence[PrefixHit | None] | None, lengths: Int64Array
) -> list[tuple[int, PrefixHit]]:
    if hits is None:
        return []
    if len(hits) != len(lengths):
        raise InvalidLength(
            f"{len(hits)} hits for {len(lengths)} sequences", given=len(hits), expected=len(lengths)
        )
    pairs = [(index, hit) for index, hit in enumerate(hits) if hit is not None]
    if len({id(hit) for _, hit in pairs}) != len(pairs):
        raise HitClosed(
            "one hit is given to two sequences; look the prompt up once for each", hits=len(pairs)
        )
    for index, hit in pairs:
        state.require_hit(hit)
        if hit.num_tokens > lengths[index]:
            raise InvalidLength(
                f"sequence {index} has {int(lengths[index])} tokens and its hit {hit.num_tokens}",
                given=int(lengths[index]),
                minimum=hit.num_tokens,
            )
    return pairs


def _apply_admit(
    state: KVState,
    request: Request,
    slots: Int64Array,
    head: int,
    handles: Int64Array,
    promised: Int64Array,
    needed: int,
    hits: list[tuple[int, PrefixHit]],
) -> Int64Array:
    table, ledger = state.table, state.ledger
    ledger.apply_know(request.tenant)
    table.apply_open(slots, head, handles, request.window)
    table.tenant[slots] = ledger.tenant_number(request.tenant)
    table.preemptions[slots] = request.preemptions
    table.promised[slots] = promised
    ledger.outstanding += needed
    ledger.apply_charge(table.tenant[slots], promised)
    for index, hit in hits:
        apply_attach(state, int(slots[index]), hit)
    state.tally.admissions += len(slots)
    return handles


def apply_attach(state: KVState, slot: int, hit: PrefixHit) -> None:
    """Turn the pins of `hit` into the front of an empty row."""
    table, count = state.table, len(hit.pages)
    table.cells[slot, :count] = hit.pages
    table.n_blocks[slot] = count
    table.seq_len[slot] = hit.num_tokens
    state.apply_attached(slot, hit.num_tokens)
    state.pool.apply_transfer_pins(hit.pages)
    hit.is_open = False
    del state.open_pins[id(hit)]
