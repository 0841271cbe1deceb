"""The page authority again, in dictionaries and lists: slow, and plain enough to be believed by reading.

It predicts everything that the real one promises: page ids, queue order, lengths, references, outcomes and
events. It checks nothing: calls must be valid ones. Sequences are named by whatever the caller likes,
usually the real handles.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from paged_kv.outcomes import CapacityDeferred, PoolShrinkRefused, UnserviceableRequest

Event = tuple[str, bytes, int]


@dataclass(slots=True)
class ReferencePage:
    """One page: who holds it, what it is known as, what it waits for."""

    refs: int = 0
    pins: int = 0
    digest: bytes | None = None
    state: str = "clean"
    epoch: int = 0


@dataclass(slots=True)
class ReferenceRow:
    """One sequence. `cells` maps logical blocks to pages."""

    cells: dict[int, int] = field(default_factory=dict)
    length: int = 0
    settled: int = 0
    window: int = 0
    first: int = 0
    promised: int = 0
    where: str = "resident"
    host: list[int] = field(default_factory=list)
    cut: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class ReferenceStep:
    """An open step."""

    epoch: int
    names: list[Hashable]
    query: list[int]
    fresh: list[tuple[Hashable, int, int]]
    copies: list[tuple[Hashable, int, int, int]]
    launched_before: int
    emitted: bool = False


class ReferenceKvModel:
    """The behaviour of `KVCacheManager`, spelled out."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        null_page: bool,
        columns: int,
        watermark: int,
        host_blocks: int,
        initial_blocks: int | None = None,
    ) -> None:
        self.size, self.columns, self.watermark = block_size, columns, watermark
        self.first_page = 1 if null_page else 0
        self.usable = num_blocks - self.first_page
        self.pages = {page: ReferencePage() for page in range(self.first_page, num_blocks)}
        self.end = num_blocks if initial_blocks is None else initial_blocks
        self.clean = [page for page in self.pages if page < self.end]
        for number in range(self.end, num_blocks):
            self.pages[number].state = "uncommitted"
        self.evictable: list[int] = []
        self.rows: dict[Hashable, ReferenceRow] = {}
        self.fence: list[tuple[int, list[int]]] = []
        self.registry: dict[bytes, list[int]] = {}
        self.registered: list[int] = []
        self.host_free = list(range(host_blocks))
        self.events: list[Event] = []
        self.begun = self.launched = self.completed = 0
        self.pending: list[tuple[int, list[tuple[Hashable, int, int]]]] = []
        self.step: ReferenceStep | None = None

    def blocks(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self.size)

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self.clean) + len(self.evictable)

    @property
    def fenced(self) -> int:
        """Pages that wait for a step."""
        return sum(page.state == "fenced" for page in self.pages.values())

    @property
    def outstanding(self) -> int:
        """Promised pages that were not taken."""
        return sum(self._need(row) for row in self.rows.values())

    @property
    def fence_epoch(self) -> int:
        """What a page that is given back now waits for; 0 for nothing."""
        return self.launched if self.launched > self.completed else 0

    def open(self, names: Sequence[Hashable], window: int = 0, promised: Sequence[int] | None = None) -> None:
        """New empty rows."""
        for index, name in enumerate(names):
            self.rows[name] = ReferenceRow(window=window, promised=promised[index] if promised else 0)

    def judge_admission(
        self,
        totals: Sequence[int],
        hits: Sequence[int],
        free_rows: int,
        rows: int,
        promises: Sequence[int] | None = None,
    ) -> CapacityDeferred | UnserviceableRequest | None:
        """Whether rows of these total lengths, with hits of so many pages, may start."""
        blocks = [self.blocks(total) for total in totals]
        promised = [self.blocks(promise) for promise in promises or totals]
        needed = sum(max(0, pages - hit) for pages, hit in zip(promised, hits, strict=True))
        usable = self.usable - self.watermark
        most = max(*blocks, needed)
        if most > usable:
            return UnserviceableRequest(most, usable, "watermark" if most <= self.usable else "pages")
        if max(blocks) > self.columns:
            return UnserviceableRequest(max(blocks), self.columns, "columns")
        if len(blocks) > rows:
            return UnserviceableRequest(len(blocks), rows, "rows")
        if len(blocks) > free_rows:
            return CapacityDeferred(len(blocks), free_rows, free_rows, "rows")
        free = self.available - self.outstanding
        room = free - self.watermark
        if needed <= max(0, room) and not (any(hits) and free < 0):
            return None
        reason = "watermark" if needed <= free else "pages"
        return CapacityDeferred(needed, max(0, room), max(0, room + self.fenced), reason)

    def begin(
        self, names: Sequence[Hashable], query: Sequence[int]
    ) -> CapacityDeferred | UnserviceableRequest | ReferenceStep:
        """Reserve a step."""
        rows = [self.rows[name] for name in names]
        widest = max((self.blocks(row.length + q) for row, q in zip(rows, query, strict=True)), default=0)
        if widest > self.usable:
            return UnserviceableRequest(widest, self.usable, "pages")
        if widest > self.columns:
            return UnserviceableRequest(widest, self.columns, "columns")
        growth = [
            (name, column)
            for name, row, q in zip(names, rows, query, strict=True)
            for column in range(self.blocks(row.length), self.blocks(row.length + q))
        ]
        copied, kept = self._shared_writes(names, query)
        needed = len(growth) + len(copied)
        promised = sum(
            self._need(row) - max(0, row.promised - self.blocks(row.length + q))
            for row, q in zip(rows, query, strict=True)
        )
        refusal = self._judge(needed, promised)
        if refusal is not None:
            return refusal
        before = self.launched
        self.begun += 1
        self.launched = self.begun
        taken = self._take(needed)
        fresh = [(name, column, page) for (name, column), page in zip(growth, taken, strict=False)]
        copies = [(*copy, page) for copy, page in zip(copied, taken[len(growth) :], strict=True)]
        for name, column, page in fresh:
            self.rows[name].cells[column] = page
        for name, column, _, page in copies:
            self.rows[name].cells[column] = page
        self._drop([source for _, _, source, _ in copies])
        for page in kept:
            self._forget(page)
        self.step = ReferenceStep(self.begun, list(names), list(query), fresh, copies, before)
        return self.step

    def commit(self, accepted: Sequence[int] | None = None) -> None:
        """Keep all, or the first `accepted[i]` tokens of each row."""
        step = self._close()
        kept = step.query if accepted is None else accepted
        record, back = [], []
        for name, count in zip(step.names, kept, strict=True):
            row = self.rows[name]
            row.length += count
            record.append((name, row.cut, row.length))
            back += self._cut_cells(row)
        self._drop(back, step.epoch)
        self.pending.append((step.epoch, record))

    def rollback(self) -> None:
        """Undo the reservation."""
        step = self._close()
        for name, column, source, _ in step.copies:
            self.rows[name].cells[column] = source
            self._hold(source, refs=1)
        for name, column, _ in step.fresh:
            del self.rows[name].cells[column]
        pages = [page for *_, page in step.fresh] + [page for *_, page in step.copies]
        self._drop(pages[::-1], step.epoch)
        if not step.emitted:
            self.launched = step.launched_before
            entries = [entry for epoch, entry in self.fence if epoch == step.epoch]
            self.fence = [entry for entry in self.fence if entry[0] != step.epoch]
            for entry in entries:
                still = [p for p in _last(entry) if self._waits(p, step.epoch)]
                if self.fence_epoch:
                    for page in still:
                        self.pages[page].epoch = self.fence_epoch
                    self.fence.append((self.fence_epoch, still))
                else:
                    self._free(still)

    def complete(self, epoch: int) -> None:
        """The device is done with every step up to `epoch`."""
        for done, record in self.pending:
            if done <= epoch:
                for name, cut, length in record:
                    if name in self.rows and self.rows[name].cut == cut:
                        self.rows[name].settled = length
        self.pending = [entry for entry in self.pending if entry[0] > epoch]
        self.completed = epoch
        while self.fence and self.fence[0][0] <= epoch:
            waited, pages = self.fence.pop(0)
            self._free([page for page in _last(pages) if self._waits(page, waited)])

    def release(self, names: Sequence[Hashable]) -> None:
        """End rows."""
        back: list[int] = []
        for name in names:
            row = self.rows.pop(name)
            self.host_free += row.host if row.where == "swapped" else []
            back += [row.cells[column] for column in sorted(row.cells, reverse=True)]
        self._drop(back)

    def truncate(self, name: Hashable, length: int) -> None:
        """Shorten a row."""
        row = self.rows[name]
        row.length, row.settled, row.cut = length, min(row.settled, length), row.cut + 1
        back = self._cut_cells(row)
        if row.promised:
            shared = sum(self.pages[page].refs + self.pages[page].pins > 1 for page in back)
            row.promised = max(0, row.promised - shared)
        self._drop(back)

    def fork(self, name: Hashable, names: Sequence[Hashable], at: int) -> None:
        """Branch a row."""
        row = self.rows[name]
        for new in names:
            cells = {column: page for column, page in row.cells.items() if column < self.blocks(at)}
            self.rows[new] = ReferenceRow(cells, at, min(at, row.settled), row.window, row.first)
            for page in cells.values():
                self._hold(page, refs=1)

    def advance(self, name: Hashable) -> int:
        """Give up pages in front of the window."""
        row = self.rows[name]
        first = max(row.first, max(0, row.settled - row.window) // self.size)
        back = [row.cells.pop(column) for column in range(first - 1, row.first - 1, -1)]
        row.first = first
        self._drop(back)
        return len(back)

    def find(self, digests: Sequence[bytes], num_tokens: int) -> list[int]:
        """Pages of the longest cached front."""
        pages: list[int] = []
        for digest in digests[: max(0, num_tokens - 1) // self.size]:
            if digest not in self.registry:
                break
            pages.append(self.registry[digest][0])
        return pages

    def pin(self, pages: Sequence[int]) -> None:
        """Pin pages."""
        for page in pages:
            self._hold(page, pins=1)

    def unpin(self, pages: Sequence[int]) -> None:
        """Drop pins, last page first."""
        for page in pages:
            self.pages[page].pins -= 1
        self._retire(list(pages[::-1]), self.fence_epoch)

    def attach(self, name: Hashable, pages: Sequence[int]) -> None:
        """Turn pins into the front of an empty row."""
        row = self.rows[name]
        row.cells = dict(enumerate(pages))
        row.length = row.settled = len(pages) * self.size
        if pages and self.fence_epoch:
            row.settled = 0
            self.pending.append((self.fence_epoch, [(name, row.cut, row.length)]))
        for page in pages:
            self.pages[page].pins -= 1
            self.pages[page].refs += 1

    def register(self, name: Hashable, digests: Sequence[bytes]) -> int:
        """Offer a row's full pages."""
        row, count = self.rows[name], 0
        for column in range(min(len(digests), row.length // self.size)):
            page = row.cells[column]
            if self.pages[page].digest is None:
                self.pages[page].digest = digests[column]
                if digests[column] not in self.registry:
                    self.events.append(("stored", digests[column], page))
                self.registry.setdefault(digests[column], []).append(page)
                self.registered.append(page)
                count += 1
        return count

    def reset(self) -> None:
        """Forget all cached content."""
        for number in self.registered:
            self.pages[number].digest = None
            if number in self.evictable:
                self.evictable.remove(number)
                self._free([number])
        self.registered.clear()
        self.registry.clear()
        self.events.append(("cleared", b"", -1))

    def quarantine(self, number: int) -> None:
        """Take a free page out of service."""
        if self.pages[number].digest is not None:
            self._forget(number)
        for queue in (self.clean, self.evictable):
            if number in queue:
                queue.remove(number)
        self.pages[number].state = "quarantined"
        self.usable -= 1

    def grow_pool(self, end: int) -> None:
        """Add pages at the end."""
        for number in range(self.end, end):
            if self.pages[number].state == "uncommitted":
                self._free([number])
        self.end = end

    def shrink_pool(self, end: int) -> PoolShrinkRefused | None:
        """Take pages from the end, or say what is in the way."""
        refusal = self._judge_end(end)
        if refusal is not None:
            lowest = next(n for n in range(end, self.end + 1) if self._judge_end(n) is None)
            return PoolShrinkRefused(end, lowest, *refusal, self.outstanding)
        for number in [number for number in self.registered if number >= end]:
            self._forget(number)
        for number in range(end, self.end):
            if self.pages[number].state != "quarantined":
                self.pages[number].state = "uncommitted"
        self.clean = [number for number in self.clean if number < end]
        self.evictable = [number for number in self.evictable if number < end]
        self.end = end
        return None

    def _judge_end(self, end: int) -> tuple[int, int] | None:
        """Live and fenced pages from `end` on, if the pool cannot end there."""
        tail = [self.pages[number].state for number in range(end, self.end)]
        free = tail.count("clean") + tail.count("evictable")
        ok = not free or self.available - free >= self.outstanding
        held = (tail.count("live"), tail.count("fenced"))
        return None if ok and held == (0, 0) else held

    def swap_out(self, name: Hashable) -> list[int] | None:
        """Take host pages for a row; None when there are too few."""
        row = self.rows[name]
        if len(row.cells) > len(self.host_free):
            return None
        row.host = [self.host_free.pop(0) for _ in row.cells]
        row.where = "swapping out"
        return row.host

    def swap_in(self, name: Hashable) -> CapacityDeferred | UnserviceableRequest | list[int]:
        """Take device pages for a swapped row."""
        row = self.rows[name]
        columns = range(row.first, self.blocks(row.length))
        promised = max(0, row.promised - row.first) - max(0, row.promised - self.blocks(row.length))
        refusal = self._judge(len(columns), promised)
        if refusal is not None:
            return refusal
        pages = self._take(len(columns))
        row.cells = dict(zip(columns, pages, strict=True))
        row.where = "swapping in"
        return pages

    def finish_swap(self, name: Hashable, *, confirm: bool) -> None:
        """Confirm or cancel a swap."""
        row = self.rows[name]
        if (row.where == "swapping out") == confirm:
            pages = [row.cells[column] for column in sorted(row.cells, reverse=True)]
            row.cells, row.where = {}, "swapped"
            self._drop(pages)
        else:
            self.host_free += row.host
            row.host, row.where = [], "resident"

    def _need(self, row: ReferenceRow) -> int:
        held = row.first if row.where == "swapped" else max(row.cells, default=row.first - 1) + 1
        return max(0, row.promised - held)

    def _judge(self, needed: int, promised: int) -> CapacityDeferred | UnserviceableRequest | None:
        extra, free = needed - promised, self.available - self.outstanding
        if needed <= self.available and (extra == 0 or extra <= free):
            return None
        if needed > self.usable:
            return UnserviceableRequest(needed, self.usable, "pages")
        room = min(self.available, max(0, free) + promised)
        return CapacityDeferred(needed, room, room + self.fenced, "pages")

    def _shared_writes(
        self, names: Sequence[Hashable], query: Sequence[int]
    ) -> tuple[list[tuple[Hashable, int, int]], list[int]]:
        """Which (row, column, page) need a copy, and which pages only lose their digest."""
        writes: dict[int, list[tuple[Hashable, int, int]]] = {}
        order = []
        for name, count in zip(names, query, strict=True):
            row = self.rows[name]
            if count and row.length % self.size:
                column = row.length // self.size
                write = (name, column, row.cells[column])
                writes.setdefault(row.cells[column], []).append(write)
                order.append(write)
        copied, kept = set(), []
        for number, writers in writes.items():
            page = self.pages[number]
            alone = page.refs == len(writers) and not page.pins
            if alone and (page.digest is None or len(writers) == 1):
                longest = sorted(writers, key=lambda write: self.rows[write[0]].length)
                copied.update(longest[:-1])
                if page.digest is not None:
                    kept.append(number)
            else:
                copied.update(writers)
        return [write for write in order if write in copied], sorted(kept)

    def _take(self, count: int) -> list[int]:
        clean, self.clean = self.clean[:count], self.clean[count:]
        missing = count - len(clean)
        evicted, self.evictable = self.evictable[:missing], self.evictable[missing:]
        for number in clean + evicted:
            page = self.pages[number]
            page.state, page.refs = "live", 1
        for number in evicted:
            self._forget(number)
        return clean + evicted

    def _forget(self, number: int) -> None:
        page = self.pages[number]
        assert page.digest is not None
        backing = self.registry[page.digest]
        backing.remove(number)
        if not backing:
            del self.registry[page.digest]
            self.events.append(("removed", page.digest, number))
        page.digest = None
        self.registered.remove(number)

    def _hold(self, number: int, *, refs: int = 0, pins: int = 0) -> None:
        page = self.pages[number]
        if page.state == "evictable":
            self.evictable.remove(number)
        page.state = "live"
        page.refs += refs
        page.pins += pins

    def _drop(self, pages: list[int], epoch: int | None = None) -> None:
        for number in pages:
            self.pages[number].refs -= 1
        self._retire(pages, self.fence_epoch if epoch is None else epoch)

    def _retire(self, pages: list[int], epoch: int) -> None:
        unheld = _last([p for p in pages if not self.pages[p].refs and not self.pages[p].pins])
        if not epoch:
            self._free(unheld)
        elif unheld:
            for number in unheld:
                self.pages[number].state, self.pages[number].epoch = "fenced", epoch
            self.fence.append((epoch, unheld))

    def _free(self, pages: list[int]) -> None:
        for number in pages:
            page = self.pages[number]
            page.state = "clean" if page.digest is None else "evictable"
            (self.clean if page.digest is None else self.evictable).append(number)

    def _waits(self, number: int, epoch: int) -> bool:
        return self.pages[number].state == "fenced" and self.pages[number].epoch == epoch

    def _cut_cells(self, row: ReferenceRow) -> list[int]:
        above = sorted((column for column in row.cells if column >= self.blocks(row.length)), reverse=True)
        return [row.cells.pop(column) for column in above]

    def _close(self) -> ReferenceStep:
        step, self.step = self.step, None
        assert step is not None
        return step


def _last(pages: list[int]) -> list[int]:
    """Each page once, where it is last listed."""
    return [page for index, page in enumerate(pages) if page not in pages[index + 1 :]]
