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
        outstanding: promised pages that their rows have not taken yet.
        quotas: the most pages of a tenant, by its number.
        used: pages charged to a tenant, by its number.
        names: tenant names, by number.
    """

    watermark: int = 0
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
        left = (quota or 0) - self.used.get(tenant, 0)
        if quota is None or extra <= left:
            return None
        return CapacityDeferred(extra, max(0, left), max(0, left), "quota")

    def batch_over_quota(self, tenants: Int64Array, extra: Int64Array) -> CapacityDeferred | None:
        """As `over_quota`, for rows of several tenants."""
        for tenant in self.quotas:
            refusal = self.over_quota(tenant, int(extra[tenants == tenant].sum()))
            if refusal is not None and refusal.needed > 0:
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
    return np.maximum(table.promised[slots] - table.n_blocks[slots], 0)


def charges(table: BlockTable, slots: Int64Array) -> Int64Array:
    """Pages that each row counts for in its tenant's quota."""
    return np.maximum(table.promised[slots], table.n_blocks[slots])


def admit(
    state: KVState,
    lengths: Int64Array,
    tenant: str | None,
    window: int,
    hits: Sequence[PrefixHit | None] | None,
) -> Int64Array | CapacityDeferred | UnserviceableRequest:
    """Open rows with a promise; see `KVCacheManager.admit`."""
    table, pool, ledger = state.table, state.pool, state.ledger
    blocks = (lengths + state.geometry.block_size - 1) >> state.geometry.block_shift
    open_hits = _open_hits(hits, lengths)
    widest, count = int(blocks.max()) if len(blocks) else 0, len(blocks)
    if widest > table.num_columns:
        return UnserviceableRequest(widest, table.num_columns, "columns")
    if count > table.num_rows:
        return UnserviceableRequest(count, table.num_rows, "rows")
    needed = int(blocks.sum()) - sum(len(hit.pages) for _, hit in open_hits)
    usable = pool.num_usable - ledger.watermark
    if max(widest, needed) > usable:
        return UnserviceableRequest(max(widest, needed), usable, "watermark" if ledger.watermark else "pages")
    number, charge = ledger.tenant_number(tenant), int(blocks.sum())
    if number in ledger.quotas and charge > ledger.quotas[number]:
        return UnserviceableRequest(charge, ledger.quotas[number], "quota")
    if count > table.free.count:
        return CapacityDeferred(count, table.free.count, table.free.count, "rows")
    room = pool.num_available - ledger.outstanding - ledger.watermark
    if needed > room:
        reason = "pages" if needed > room + ledger.watermark else "watermark"
        return CapacityDeferred(needed, max(0, room), max(0, room + pool.num_fenced), reason)
    over = ledger.over_quota(number, charge)
    if over is not None:
        return over
    slots, head = table.choose_rows(count)
    handles = table.next_handles(slots)
    return _apply_admit(state, slots, head, handles, window, tenant, blocks, needed, open_hits)


def _open_hits(hits: Sequence[PrefixHit | None] | None, lengths: Int64Array) -> list[tuple[int, PrefixHit]]:
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
        hit.require_open()
        if hit.num_tokens > lengths[index]:
            raise InvalidLength(
                f"sequence {index} has {int(lengths[index])} tokens and its hit {hit.num_tokens}",
                given=int(lengths[index]),
                minimum=hit.num_tokens,
            )
    return pairs


def _apply_admit(
    state: KVState,
    slots: Int64Array,
    head: int,
    handles: Int64Array,
    window: int,
    tenant: str | None,
    blocks: Int64Array,
    needed: int,
    hits: list[tuple[int, PrefixHit]],
) -> Int64Array:
    table, ledger = state.table, state.ledger
    ledger.apply_know(tenant)
    table.apply_open(slots, head, handles, window)
    table.tenant[slots] = ledger.tenant_number(tenant)
    table.promised[slots] = blocks
    ledger.outstanding += needed
    ledger.apply_charge(table.tenant[slots], blocks)
    for index, hit in hits:
        apply_attach(state, int(slots[index]), hit)
    state.tally.admissions += len(slots)
    return handles


def apply_attach(state: KVState, slot: int, hit: PrefixHit) -> None:
    """Turn the pins of `hit` into the front of an empty row."""
    table, count = state.table, len(hit.pages)
    table.cells[slot, :count] = hit.pages
    table.n_blocks[slot] = count
    table.seq_len[slot] = table.settled[slot] = hit.num_tokens
    state.pool.apply_transfer_pins(hit.pages)
    hit.is_open = False
