"""What must hold between any two operations, and a digest of all that must not change by chance.

The numbers I1 to I13 are those of the table in the package's documentation. "fast" looks at every page and
row once, "full" at every table cell. I14 to I16 (a failed call, a repeated trace and a plan change nothing)
compare digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
import numpy.typing as npt

from .admission import charges, future_need
from .block_pool import (
    CLEAN,
    EVICTABLE,
    FENCED,
    HASHED,
    HELD,
    LIVE,
    NULL,
    PIN,
    QUARANTINED,
    REF,
    REF_MASK,
    UNCOMMITTED,
)
from .block_table import (
    FREE,
    GENERATION_BITS,
    PAD,
    RESIDENT,
    SLOT_BITS,
    SWAPPED,
    SWAPPING_IN,
    SWAPPING_OUT,
)
from .errors import InvariantViolation
from .state import KVState

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def check_fast(state: KVState) -> None:
    """I1, I3, I7, I8, I10, I13, I17 and I18.

    Raises:
        InvariantViolation: with the invariant's name and the first offenders.
    """
    _page_states(state)
    _rows(state)
    _tails(state)
    _fence(state)
    _promises(state)


def check_full(state: KVState) -> None:
    """All of `check_fast`, and I2, I4, I5, I6, I9, I11 and I12.

    Raises:
        InvariantViolation: with the invariant's name and the first offenders.
    """
    check_fast(state)
    live = _live_cells(state)
    _cells(state, live)
    _claims(state, live)
    _queues(state)
    _fence_lists(state)
    _digests(state)
    _host(state)
    _counters(state)


def _require(name: str, ok: bool, message: str, offenders: tuple[int, ...] = ()) -> None:
    if not ok:
        raise InvariantViolation(f"{name}: {message}", invariant=name, offenders=offenders)


def _require_all(name: str, good: BoolArray, message: str) -> None:
    if not good.all():
        bad = np.flatnonzero(~good)
        first = tuple(int(index) for index in bad[:8])
        _require(name, False, f"{message}; {len(bad)} offend, first {first}", first)


def _page_states(state: KVState) -> None:
    pool = state.pool
    counts = np.bincount(pool.state, minlength=7)
    expected = (
        state.geometry.first_page,
        pool.clean.count,
        pool.evictable.count,
        pool.num_live,
        pool.num_fenced,
        pool.num_quarantined,
        int(counts[UNCOMMITTED]),
    )
    _require("I1", tuple(counts.tolist()) == expected, f"page states {counts.tolist()}, counters {expected}")
    beyond = np.arange(len(pool.state)) >= pool.num_blocks
    away = (pool.state == UNCOMMITTED) | (beyond & (pool.state == QUARANTINED))
    _require_all("I18", away == beyond, "pages beyond the pool's end, and no others, are uncommitted")
    held = (pool.claims & HELD) > 0
    hashed = (pool.claims & HASHED) != 0
    _require_all("I3", held == (pool.state == LIVE), "a page is live if and only if someone holds it")
    _require_all("I3", ~hashed | np.isin(pool.state, (LIVE, EVICTABLE, FENCED)), "no digest on a clean page")
    _require_all("I3", hashed | (pool.state != EVICTABLE), "an evictable page has a digest")
    _require_all("I3", (pool.state != NULL) | (pool.claims == 0), "nobody holds the null page")
    _require_all("I3", (pool.state != QUARANTINED) | (pool.claims == 0), "nobody holds a quarantined page")


def _rows(state: KVState) -> None:
    table, size = state.table, state.geometry.block_size
    blocks = (table.seq_len + size - 1) // size
    if state.step is not None:
        blocks[state.step.slots] = state.step.new_blocks
    blocks = np.where(table.state == SWAPPED, table.first_block, blocks)
    _require_all("I7", table.n_blocks == blocks, "a row has as many blocks as its tokens need")
    _require_all("I8", (table.settled >= 0) & (table.settled <= table.seq_len), "settled tokens are tokens")
    _require_all("I8", table.seq_len <= table.num_columns * size, "a row fits in its columns")
    given_up = table.first_block * size
    kept = np.maximum(0, table.settled - table.window)
    _require_all("I8", (given_up == 0) | (given_up <= kept), "a row holds its window")


def _tails(state: KVState) -> None:
    """I17: a partly filled last page that others can read is known to be one before anyone writes to it."""
    table, pool = state.table, state.pool
    marked = table.tail_shared.copy()
    if state.step is not None:
        marked[state.step.slots] = True
    rows = np.flatnonzero(
        (table.seq_len % state.geometry.block_size > 0) & (table.n_blocks > table.first_block) & ~marked
    )
    pages = table.cells[rows, table.n_blocks[rows] - 1]
    _require_all("I17", pool.claims[pages] == REF, "an unmarked last page belongs to its row alone")


def _fence(state: KVState) -> None:
    pool, epochs = state.pool, state.epochs
    _require("I10", epochs.completed <= epochs.launched <= epochs.begun, "epochs are in order")
    fenced = pool.state == FENCED
    in_flight = (pool.fence_epoch > epochs.completed) & (pool.fence_epoch <= epochs.launched)
    _require_all("I10", ~fenced | in_flight, "a fenced page waits for a step in flight")


def _promises(state: KVState) -> None:
    every = np.arange(state.table.num_rows)
    need = int(future_need(state.table, every).sum())
    _require(
        "I13", state.ledger.outstanding == need, f"{need} promised pages, {state.ledger.outstanding} noted"
    )
    _require("I13", need <= state.geometry.usable_blocks, f"{need} promised pages do not exist")


def _live_cells(state: KVState) -> BoolArray:
    table = state.table
    column = np.arange(table.num_columns)
    return np.logical_and(column >= table.first_block[:, None], column < table.n_blocks[:, None])


def _cells(state: KVState, live: BoolArray) -> None:
    table, geometry = state.table, state.geometry
    inside = (table.cells >= geometry.first_page) & (table.cells < geometry.num_blocks)
    _require_all("I5", (inside == live).all(axis=1), "live cells hold pages")
    _require_all("I5", ((table.cells == PAD) | live).all(axis=1), "other cells are PAD")
    ordered = np.sort(table.cells, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != PAD)
    _require_all("I6", ~twice.any(axis=1), "no page twice in a row")


def _claims(state: KVState, live: BoolArray) -> None:
    pool, size = state.pool, state.geometry.num_blocks
    refs = np.bincount(state.table.cells[live], minlength=size)
    _require_all("I2", refs == (pool.claims & REF_MASK), "references are live cells")
    pins = np.zeros(size, dtype=np.int64)
    for held in state.open_pins.values():
        np.add.at(pins, held.pages, 1)
    _require_all("I2", pins == (pool.claims & HELD) // PIN, "pins are open pins")


def _queues(state: KVState) -> None:
    pool = state.pool
    for name, queue, kind in (("clean", pool.clean, CLEAN), ("evictable", pool.evictable, EVICTABLE)):
        entries = np.sort(queue.entries())
        same = np.array_equal(entries, np.flatnonzero(pool.state == kind))
        _require("I4", same, f"the {name} queue holds each {name} page once")


def _fence_lists(state: KVState) -> None:
    pool = state.pool
    listed = {(int(page), epoch) for epoch, pages in pool.fence for page in pages}
    fenced = {(int(page), int(pool.fence_epoch[page])) for page in np.flatnonzero(pool.state == FENCED)}
    _require("I10", fenced <= listed, "a fenced page is listed under its epoch")


def _digests(state: KVState) -> None:
    prefix, pool = state.prefix, state.pool
    hashed = set(np.flatnonzero(pool.claims & HASHED).tolist())
    _require("I9", hashed == set(prefix.digest_of), "pages with the digest bit are the registered ones")
    _require("I9", len(prefix.page_of) <= len(hashed), "no more digests than registered pages")
    backed: set[int] = set(prefix.page_of.values())
    for pages in prefix.duplicates.values():
        _require("I9", len(pages) > 0 and not backed & set(pages), "a duplicate is listed once")
        backed |= set(pages)
    _require("I9", backed == hashed, "every registered page backs its digest")
    agree = all(prefix.digest_of[page] == digest for digest, page in prefix.page_of.items())
    agree &= all(
        prefix.digest_of[page] == digest for digest, pages in prefix.duplicates.items() for page in pages
    )
    _require("I9", agree, "digest to page and page to digest agree")
    if prefix.verify:
        _require("I9", set(prefix.histories) == set(prefix.page_of), "every digest has its history")


def _host(state: KVState) -> None:
    table, host = state.table, state.host
    away = set(np.flatnonzero(np.isin(table.state, (SWAPPING_OUT, SWAPPED, SWAPPING_IN))).tolist())
    _require("I11", away == set(host.held), "rows on the host hold host pages")
    pages = [page for held in host.held.values() for page in held.tolist()] + host.free.entries().tolist()
    _require("I11", sorted(pages) == list(range(host.num_pages)), "every host page is free or held once")
    ready = np.where(table.state == RESIDENT, table.handle, -1)
    _require_all("I11", table.ready == ready, "only resident rows can be planned")
    rows = np.arange(table.num_rows)
    full = (table.tag << (SLOT_BITS + GENERATION_BITS)) | (table.generation << SLOT_BITS) | rows
    expected = np.where(table.state == FREE, -1, full)
    _require_all("I11", table.handle == expected, "a handle names its row; a free row has none")
    late = np.maximum(table.version, table.cut) > table.last_version
    _require_all("I11", ~late, "no row changed after the last change")


def _counters(state: KVState) -> None:
    pool, table, ledger = state.pool, state.table, state.ledger
    shared = int(np.count_nonzero((pool.claims & REF_MASK) > 1))
    _require("I12", shared == pool.num_shared, f"{shared} shared pages, {pool.num_shared} counted")
    advanced = int(np.count_nonzero(table.first_block))
    _require(
        "I12", advanced == table.num_advanced, f"{advanced} rows with holes, {table.num_advanced} counted"
    )
    free = np.sort(table.free.entries())
    _require("I12", np.array_equal(free, np.flatnonzero(table.state == FREE)), "free rows are queued once")
    in_use = pool.counters.allocations - pool.counters.frees + pool.counters.revivals
    _require("I12", in_use == pool.num_live, f"{pool.num_live} live pages, counters say {in_use}")
    every = np.arange(table.num_rows)
    for tenant in range(len(ledger.names)):
        charged = int(charges(table, every)[table.tenant == tenant].sum())
        _require("I12", charged == ledger.used.get(tenant, 0), f"tenant {tenant} holds {charged} pages")


def digest(state: KVState) -> str:
    """SHA-256 over pages, rows, queues, maps and epochs; equal digests mean that nothing observable differs.

    Totals that count attempts (deferrals, queries) are left out, and so is the manager's tag in its handles.
    """
    total = hashlib.sha256()
    for part in _parts(state):
        total.update(part)
    return total.hexdigest()


def _parts(state: KVState) -> Iterator[bytes]:
    pool, table, epochs, prefix = state.pool, state.table, state.epochs, state.prefix
    for array in (pool.claims, pool.state, table.cells, table.state, table.generation):
        yield array.tobytes()
    for array in (
        table.seq_len,
        table.settled,
        table.n_blocks,
        table.first_block,
        table.window,
        table.version,
    ):
        yield array.tobytes()
    for array in (
        table.cut,
        table.promised,
        table.tenant,
        table.preemptions,
        (table.ready >= 0).view(np.uint8),
        table.tail_shared.view(np.uint8),
    ):
        yield array.tobytes()
    yield np.where(pool.state == FENCED, pool.fence_epoch, 0).tobytes()
    for queue in (pool.clean, pool.evictable, table.free, state.host.free):
        yield queue.entries().tobytes() + b"|"
    yield repr([(epoch, pages.tolist()) for epoch, pages in pool.fence]).encode()
    yield repr((epochs.begun, epochs.launched, epochs.completed, astuple(pool.counters))).encode()
    yield repr(
        [(record.epoch, record.slots.tolist(), record.lengths.tolist()) for record in epochs.pending]
    ).encode()
    yield repr((list(prefix.page_of.items()), list(prefix.digest_of.items()), prefix.duplicates)).encode()
    yield repr(sorted(prefix.histories.items())).encode()
    yield repr(sorted((slot, pages.tolist()) for slot, pages in state.host.held.items())).encode()
    yield repr([pins.pages.tolist() for pins in state.open_pins.values()]).encode()
    yield repr(
        (state.ledger.outstanding, state.ledger.quotas, state.ledger.used, state.ledger.names)
    ).encode()
    yield repr(
        (pool.num_blocks, state.events.num_events, None if state.step is None else state.step.epoch)
    ).encode()
