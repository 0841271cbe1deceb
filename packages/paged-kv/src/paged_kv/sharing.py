"""The manager's calls around shared content: prefix hits, pins, registration."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .admission import apply_attach
from .authority import Authority
from .block_pool import HASHED, LIVE, QUARANTINED, REF_MASK, UNCOMMITTED
from .errors import (
    InvalidGeometry,
    InvalidLength,
    InvalidWindow,
    PageNotOwned,
    PrefixMismatch,
    RowNotEmpty,
    UnverifiedHash,
)
from .geometry import is_integer
from .hashing import PrefixChain
from .outcomes import CapacityDeferred
from .prefix_cache import PagePins, PrefixHit
from .requirements import require_one
from .state import KVState
from .vectors import IntVector

Int64Array = npt.NDArray[np.int64]

COMPARE_CHUNK = 64


class SharingCalls(Authority):
    """Prefix cache, pins and what rows have in common."""

    def lookup_and_pin(self, chain: PrefixChain) -> PrefixHit:
        """Find and pin the longest cached front of a prompt in one call, so that nobody takes it in between.

        At most ``num_tokens - 1`` tokens are hit: one query token must be left to compute. A hit of no pages
        is a hit too.

        Raises:
            InvalidGeometry: the chain was made for another block size.
            UnverifiedHash: the chain's hash is not SHA-256 and the manager does not compare tokens.
        """
        state = self._enter()
        _require_chain(state, chain)
        limit = max(0, chain.num_tokens - 1) // state.geometry.block_size
        pages = state.prefix.find(chain, min(limit, len(chain.digests)))
        hit = PrefixHit(pages, len(pages) * state.geometry.block_size, self._drop_pins)
        return _apply_hit(state, chain, hit)

    def attach(self, row: int | np.integer, hit: PrefixHit) -> CapacityDeferred | None:
        """Make a hit the front of an empty row; None when done.

        A deferral means that the pinned pages are promised to admitted rows; the hit stays open. Rows that
        are opened by `admit` take their hits there.

        Raises:
            UnknownSequence, StaleSequenceHandle, RowBusy: bad row.
            RowNotEmpty: the row has tokens or a promise.
            InvalidLength: the row has fewer columns than the hit.
            HitClosed, ForeignClaim: the hit was used before, or is none of this manager's.
        """
        state = self._enter()
        state.require_hit(hit)
        table, slot = state.table, state.table.resolve_one(row)
        require_one(state, slot)
        if table.seq_len[slot] or table.promised[slot]:
            raise RowNotEmpty(
                f"row {slot} has {int(table.seq_len[slot])} tokens and a promise of "
                f"{int(table.promised[slot])} pages; attach a hit to a row fresh from create",
                row=slot,
                tokens=int(table.seq_len[slot]),
                promised=int(table.promised[slot]),
            )
        if len(hit.pages) > table.num_columns:
            raise InvalidLength(
                f"the hit has {len(hit.pages)} pages and a row {table.num_columns} columns",
                given=len(hit.pages),
                maximum=table.num_columns,
            )
        return self._apply_leave(_attach(state, slot, hit))

    def pin(self, row: int | np.integer) -> PagePins:
        """Pin the full pages of a row whose steps are complete, for a reader outside the steps (an offload).

        The pages keep their content, and are not given to anyone, until the pins are dropped; the row itself
        may go on or be released.

        Raises:
            UnknownSequence, StaleSequenceHandle, PageNotResident, RowBusy: bad row.
        """
        state = self._enter()
        slot, size = state.table.resolve_one(row), state.geometry.block_size
        require_one(state, slot)
        first, stop = int(state.table.first_block[slot]), int(state.table.settled[slot]) // size
        pages = state.table.cells[slot, first:stop].astype(np.int64)
        return _apply_pin(state, PagePins(pages, len(pages) * size, self._drop_pins))

    def register(self, row: int | np.integer, chain: PrefixChain) -> int:
        """Offer the full, committed pages of a row to later prompts, under the digests of `chain`.

        The chain must describe the row's tokens; shorten it with `PrefixChain.truncate` when the row was
        truncated. Drafts are never registered: only committed tokens count.

        Returns:
            Pages newly registered.

        Raises:
            UnknownSequence, StaleSequenceHandle, PageNotResident, RowBusy: bad row.
            InvalidWindow: the row has a window; its chain would lose its front.
            PrefixMismatch: a page is already registered under another digest.
            InvalidGeometry, UnverifiedHash: as in `lookup_and_pin`.
        """
        state = self._enter()
        slot = state.table.resolve_one(row)
        require_one(state, slot)
        _require_chain(state, chain)
        return self._apply_leave(_register(state, slot, chain))

    def reset_prefix_cache(self) -> None:
        """Forget all cached content; pages that rows or pins hold stay with them."""
        state = self._enter()
        self._apply_leave(_apply_clear(state))

    def common_prefix_blocks(self, rows: IntVector | int) -> int:
        """How many leading full pages all rows share, for cascade attention.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest: bad rows.
        """
        state = self._enter()
        slots = self._rows(rows)
        return _common_prefix(state, slots) if len(slots) else 0

    def quarantine(self, page: int) -> None:
        """Take a page whose storage failed out of service for good.

        Raises:
            PageNotOwned: the page is held, perhaps by an open step, is the null page, or does not exist.
        """
        state = self._enter()
        geometry = state.geometry
        if (
            not is_integer(page)
            or not geometry.first_page <= page < geometry.num_blocks
            or state.pool.state[page] in (LIVE, QUARANTINED, UNCOMMITTED)
            or (state.step is not None and page in state.step.shared.sources)  # a rollback needs it
        ):
            raise PageNotOwned(
                f"page {page!r} is not a free page of this pool; release its rows first", page=repr(page)
            )
        self._apply_leave(_apply_quarantine(state, int(page)))

    def _drop_pins(self, pins: PagePins) -> None:
        state = self._enter()
        state.require_own(pins)
        state.pool.require_pins(pins.pages)
        _apply_drop_pins(state, pins)


def _require_chain(state: KVState, chain: PrefixChain) -> None:
    if chain.block_size != state.geometry.block_size:
        raise InvalidGeometry(
            f"the chain hashes blocks of {chain.block_size} tokens, the pool's pages hold "
            f"{state.geometry.block_size}; hash by page",
            given=chain.block_size,
            expected=state.geometry.block_size,
        )
    if not chain.is_sha256 and not state.prefix.verify:
        raise UnverifiedHash("the chain's hash may collide; build the manager with verify_tokens=True")


def _apply_hit(state: KVState, chain: PrefixChain, hit: PrefixHit) -> PrefixHit:
    tally = state.tally
    tally.prefix_queries += 1
    tally.prefix_hits += 1 if len(hit.pages) else 0
    tally.prefix_query_tokens += chain.num_tokens
    tally.prefix_hit_tokens += hit.num_tokens
    _apply_pin(state, hit)
    return hit


def _attach(state: KVState, slot: int, hit: PrefixHit) -> CapacityDeferred | None:
    available, outstanding = state.pool.num_available, state.ledger.outstanding
    if outstanding > available:
        short = outstanding - available
        return CapacityDeferred(len(hit.pages), max(0, len(hit.pages) - short), len(hit.pages))
    tenant = int(state.table.tenant[slot])
    over = state.ledger.over_quota(tenant, len(hit.pages))
    if over is not None:
        return over
    return _apply_attach(state, slot, hit)


def _apply_attach(state: KVState, slot: int, hit: PrefixHit) -> CapacityDeferred | None:
    apply_attach(state, slot, hit)
    row = np.array([slot])
    state.ledger.apply_charge(state.table.tenant[row], np.array([len(hit.pages)]))
    state.table.apply_touch(row)
    return None


def _apply_pin(state: KVState, pins: PagePins) -> PagePins:
    state.open_pins[id(pins)] = pins
    state.pool.apply_pin(pins.pages)
    return pins


def _apply_drop_pins(state: KVState, pins: PagePins) -> None:
    pins.is_open = False
    del state.open_pins[id(pins)]
    state.pool.apply_unpin(pins.pages[::-1], state.epochs.fence)


def _register(state: KVState, slot: int, chain: PrefixChain) -> int:
    table, pool = state.table, state.pool
    if table.window[slot]:
        raise InvalidWindow(f"row {slot} has a window; only rows without one are cached", row=slot)
    full = min(len(chain.digests), int(table.seq_len[slot]) // state.geometry.block_size)
    pages = table.cells[slot, :full].astype(np.int64)
    hashed = (pool.claims[pages] & HASHED) != 0
    if hashed.any():
        # A digest stands for all tokens up to its block: the last known one vouches for those in front of it.
        last = int(np.flatnonzero(hashed)[-1])
        if state.prefix.digest_of[int(pages[last])] != chain.digests[last]:
            raise PrefixMismatch(
                f"page {int(pages[last])}, block {last} of row {slot}, is registered under another "
                "digest; the chain does not describe this row",
                row=slot,
                block=last,
                page=int(pages[last]),
            )
    stop = state.prefix.registrable_blocks(chain, full)
    blocks = np.flatnonzero(~hashed[:stop])
    digests = [chain.digests[block] for block in blocks]
    histories = [chain.histories[block] for block in blocks]
    return _apply_register(state, pages[blocks].tolist(), digests, histories)


def _apply_register(state: KVState, pages: list[int], digests: list[bytes], histories: list[bytes]) -> int:
    state.prefix.apply_store(pages, digests, histories)
    return len(pages)


def _common_prefix(state: KVState, slots: Int64Array) -> int:
    table, pool = state.table, state.pool
    if table.first_block[slots].any():
        return 0
    limit = int(table.seq_len[slots].min()) // state.geometry.block_size
    limit = min(limit, int(table.n_blocks[slots].min()))
    first = table.cells[slots[0], :limit]
    held_by_few = (pool.claims[first] & REF_MASK) < len(slots)
    if held_by_few.any():
        limit = int(held_by_few.argmax())
    for start in range(0, limit, COMPARE_CHUNK):
        stop = min(start + COMPARE_CHUNK, limit)
        same = (table.cells[slots, start:stop] == first[start:stop]).all(axis=0)
        if not same.all():
            return start + int((~same).argmax())
    return limit


def _apply_clear(state: KVState) -> bool:
    state.prefix.apply_clear()
    return True


def _apply_quarantine(state: KVState, page: int) -> bool:
    if page in state.prefix.digest_of:
        state.prefix.apply_forget([page])
    state.pool.apply_quarantine(page)
    return True
