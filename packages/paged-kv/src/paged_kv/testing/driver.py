"""Random walks over every public operation of the authority, compared with the plain model after each one.

`KvDriver.act` performs one operation on a small manager, on `ReferenceKvModel` and on a `HistoryCache`, and
`assert_agreement` compares all that can be seen: page ids, queues, references, lengths, outcomes, events,
and what every row reads. Where the choices come from is the caller's affair: a seeded generator, or a
property testing tool that can shrink them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from paged_kv.admission_calls import PreemptedSequence
from paged_kv.block_pool import HELD, PIN, REF_MASK, STATE_NAMES
from paged_kv.block_table import PAD, SLOT_MASK
from paged_kv.errors import StaleSequenceHandle
from paged_kv.geometry import PageGeometry
from paged_kv.hashing import CacheKey, PrefixChain
from paged_kv.index_buffers import IndexPlanBuffers, PadPolicy
from paged_kv.index_plan import PagedIndexPlan, PagedRequest
from paged_kv.manager import KVCacheManager
from paged_kv.outcomes import CapacityDeferred, UnserviceableRequest
from paged_kv.prefix_cache import PagePins, PrefixHit
from paged_kv.step import StepState, StepTransaction
from paged_kv.swap import SwapPlan

from .history import HistoryCache, history_of
from .reference import ReferenceKvModel

Item = TypeVar("Item")

SIZE, ROWS, COLUMNS = 16, 6, 6
MAX_TOKENS = 4 * 33
MAX_PREEMPTIONS = 1
KEY = CacheKey(model="driver", dtype="float16", layout="LATENT")
PROMPTS = (5, 16, 17, 33, 49, 70)
QUERIES = (1, 1, 2, 15, 16, 17, 33, 0)


class Choose(Protocol):
    """Where a walk's choices come from."""

    def one(self, items: Sequence[Item]) -> Item:
        """One of `items`, which is not empty."""

    def between(self, low: int, high: int) -> int:
        """An integer in ``[low, high]``."""


class KvDriver:
    """A manager, its model and its cache, kept in step.

    Args:
        choose: the source of choices.
        blocks: usable pages.
        null_page: whether page 0 is kept out of use.
        watermark: pages that admission leaves free.
        host_blocks: host pages.
        verify_tokens: whether the manager compares the tokens behind digests.
        initial: usable pages that are there at first; None for all.
    """

    def __init__(
        self,
        choose: Choose,
        *,
        blocks: int,
        null_page: bool = True,
        watermark: int = 0,
        host_blocks: int = 0,
        verify_tokens: bool = False,
        initial: int | None = None,
    ) -> None:
        total, watermark = blocks + null_page, min(watermark, blocks - 1)
        there = total if initial is None else initial + null_page
        self.choose = choose
        self.resizes = initial is not None
        self.events: list[tuple[str, bytes, int]] = []
        self.kv = KVCacheManager(
            PageGeometry(total, SIZE, null_page=null_page),
            max_sequences=ROWS,
            initial_blocks=there,
            max_blocks_per_sequence=COLUMNS,
            watermark=watermark,
            host_blocks=host_blocks,
            verify_tokens=verify_tokens,
            max_preemptions=MAX_PREEMPTIONS,
            event_sinks=[lambda event: self.events.append((event.kind, event.digest, event.page))],
        )
        self.model = ReferenceKvModel(
            total,
            SIZE,
            null_page=null_page,
            columns=COLUMNS,
            watermark=watermark,
            host_blocks=host_blocks,
            initial_blocks=there,
        )
        self.cache = HistoryCache(total, SIZE, host_blocks)
        policy = PadPolicy.NULL_PAGE if null_page else PadPolicy.PAD
        self.buffers = [IndexPlanBuffers(ROWS, MAX_TOKENS, 8, policy=policy) for _ in range(2)]
        self.tokens: dict[int, list[int]] = {}
        self.windows: dict[int, int] = {}
        self.step: StepTransaction | None = None
        self.drafts: dict[int, list[int]] = {}
        self.released: list[int] = []
        self.left: list[tuple[PreemptedSequence, list[int]]] = []
        self.swaps: dict[int, SwapPlan] = {}
        self.hits: list[tuple[PrefixHit, list[int]]] = []
        self.pinned: list[PagePins] = []

    @property
    def operations(self) -> list[tuple[Callable[[], None], int, bool]]:
        """Every operation with its weight and whether it can be done now."""
        room, stepping = ROWS - len(self.tokens), self.step is not None
        here, waiting = bool(self._rows("resident")), self._last_launched() > self.model.completed
        return [
            (self.create, 4, room >= 2),
            (self.admit, 4, True),
            (self.release, 3, bool(self._rows("idle"))),
            (self.resume, 4, bool(self.left)),
            (self.quarantine, 1, self.model.usable > 2 and bool(self._free_pages())),
            (self.grow_pool, 2, self.model.end < self.kv.geometry.num_blocks),
            (self.shrink_pool, 2, not stepping and self.resizes),
            (self.use_a_released_row, 1, bool(self.released)),
            (self.truncate, 3, here),
            (self.fork, 3, here and room >= 2),
            (self.advance, 3, bool(self._rows("windowed"))),
            (self.whole_step, 12, not stepping),
            (self.begin, 3, not stepping),
            (self.finish, 8, stepping),
            (self.complete, 6, waiting),
            (self.register, 5, bool(self._rows("unwindowed"))),
            (self.lookup, 3, True),
            (self.attach, 3, bool(self.hits and self._rows("empty"))),
            (self.drop_hit, 1, bool(self.hits)),
            (self.pin, 1, here),
            (self.unpin, 1, bool(self.pinned)),
            (self.reset, 1, bool(self.model.registered)),
            (self.common_prefix, 1, here),
            (self.look, 2, here),
            (self.swap_out, 2, bool(self._rows("alone"))),
            (self.swap_in, 4, bool(self._rows("swapped"))),
            (self.finish_swap, 4, bool(self.swaps)),
        ]

    def act(self) -> None:
        """Do one operation; `assert_agreement` compares."""
        possible = [operation for operation, weight, can in self.operations if can for _ in range(weight)]
        self.choose.one(possible)()

    def assert_agreement(self) -> None:
        """Check the invariants and compare everything with the model.

        Raises:
            AssertionError: Something differs.
            InvariantViolation: The manager's own books disagree.
        """
        self.same_as_the_model()
        self.residents_read_their_own_history()

    # picking

    def _rows(self, kind: str) -> list[int]:
        """Rows that are not in an open step or swap, of one kind."""
        in_step = set() if self.step is None else set(self.step.handles.tolist())
        idle = [name for name in self.tokens if name not in in_step and name not in self.swaps]
        here = [name for name in idle if self.model.rows[name].where == "resident"]
        match kind:
            case "idle":
                return idle
            case "resident":
                return here
            case "windowed":
                return [name for name in here if self.windows[name]]
            case "unwindowed":
                return [name for name in here if not self.windows[name]]
            case "empty":
                return [n for n in here if not self.tokens[n] and not self.model.rows[n].promised]
            case "swapped":
                return [name for name in idle if self.model.rows[name].where == "swapped"]
            case "alone":
                pages = self.model.pages
                cells = {name: self.model.rows[name].cells.values() for name in here}
                return [n for n in here if all(pages[p].refs + pages[p].pins == 1 for p in cells[n])]
        raise AssertionError(kind)

    def _pick(self, kind: str) -> int:
        return self.choose.one(self._rows(kind))

    def _some(self, kind: str, low: int, high: int) -> list[int]:
        rows = self._rows(kind)
        count = min(len(rows), self.choose.between(low, high))
        picked: list[int] = []
        for _ in range(count):
            picked.append(self.choose.one([name for name in rows if name not in picked]))
        return picked

    def _lowest(self, name: int) -> int:
        """The shortest length at which the row still holds its window."""
        row = self.model.rows[name]
        return row.first * SIZE + self.windows[name] if row.first else 0

    def _prompt(self) -> list[int]:
        letter = self.choose.between(0, 1)
        return [letter] * self.choose.one(PROMPTS)

    @staticmethod
    def _chain(tokens: list[int]) -> PrefixChain:
        chain = PrefixChain(KEY, SIZE)
        chain.extend(tokens)
        return chain

    # rows

    def _opened(self, handles: list[int], window: int) -> None:
        for handle in handles:
            self.tokens[handle], self.windows[handle] = [], window

    def create(self) -> None:
        """Open empty rows."""
        count, window = self.choose.between(1, 2), self.choose.one((0, 0, 0, 7, 16))
        handles = self.kv.create(count, window=window).tolist()
        self.model.open(handles, window)
        self._opened(handles, window)

    def admit(self) -> None:
        """Ask to start one or two rows."""
        extra = [self.choose.between(1, 40)][: self.choose.between(0, 1)]
        more = self.choose.between(0, 30)
        prompt = self._prompt()
        hit = self._hit(prompt)
        totals = [len(prompt) + more, *extra]
        expected = self.model.judge_admission(
            totals, [len(hit.pages), *[0] * len(extra)], ROWS - len(self.tokens), ROWS
        )
        got = self.kv.admit(totals, hits=[hit, *[None] * len(extra)])
        if isinstance(got, (CapacityDeferred, UnserviceableRequest)):
            assert got == expected
            self._unpin(hit)
            return
        assert expected is None
        handles = got.tolist()
        self.model.open(handles, 0, [self.model.blocks(total) for total in totals])
        self.model.attach(handles[0], hit.pages.tolist())
        self._opened(handles, 0)
        self.tokens[handles[0]] = prompt[: hit.num_tokens]

    def release(self) -> None:
        """Release or preempt one or two rows."""
        preempt = self.choose.one((False, False, True))
        names = self._some("idle", 1, 2)
        if preempt:
            left = self.kv.preempt(names)
            assert [sequence.num_tokens for sequence in left] == [len(self.tokens[n]) for n in names]
            assert [sequence.preemptions for sequence in left] == [
                self.model.rows[name].preemptions + 1 for name in names
            ]
            self.left += [(sequence, self.tokens[name]) for sequence, name in zip(left, names, strict=True)]
        else:
            self.kv.release(names)
        self.model.release(names)
        for name in names:
            del self.tokens[name]
            self.released.append(name)

    def resume(self) -> None:
        """Bring a preempted sequence back."""
        sequence, tokens = self.left.pop()
        hit = self._hit(tokens) if tokens and not sequence.window else None
        total = len(tokens) + self.choose.between(1, 20)
        pages = [] if hit is None else hit.pages.tolist()
        promise = total if sequence.preemptions > MAX_PREEMPTIONS else len(tokens) + 1
        expected = self.model.judge_admission([total], [len(pages)], ROWS - len(self.tokens), ROWS, [promise])
        got = self.kv.resume(sequence, total, hit)
        if isinstance(got, (CapacityDeferred, UnserviceableRequest)):
            assert got == expected
            if hit is not None:
                self._unpin(hit)
            return
        assert expected is None
        [name] = got.tolist()
        self.model.open([name], sequence.window, [max(self.model.blocks(promise), len(pages))])
        self.model.rows[name].preemptions = sequence.preemptions
        self.model.attach(name, pages)
        self._opened([name], sequence.window)
        self.tokens[name] = tokens[: len(pages) * SIZE]

    def _free_pages(self) -> list[int]:
        free = ("clean", "evictable", "fenced")
        return [number for number, page in self.model.pages.items() if page.state in free]

    def quarantine(self) -> None:
        """Take a free page out of service, as long as promises can still be kept."""
        if self.model.outstanding:
            return
        page = self.choose.one(self._free_pages())
        self.kv.quarantine(page)
        self.model.quarantine(page)

    def grow_pool(self) -> None:
        """Add pages at the end of the pool."""
        end = self.choose.between(self.model.end, self.kv.geometry.num_blocks)
        self.kv.grow_pool(end)
        self.model.grow_pool(end)

    def shrink_pool(self) -> None:
        """Take pages from the end of the pool, if nothing is in the way."""
        end = self.choose.between(self.model.first_page, self.model.end)
        assert self.kv.shrink_pool(end) == self.model.shrink_pool(end)

    def use_a_released_row(self) -> None:
        """Use a released row in every way; each is refused and changes nothing."""
        name = self.choose.one(self.released)
        before = self.kv.digest()
        for call in (self.kv.release, self.kv.fork, self.kv.pin, self.kv.preempt, self.kv.swap_out):
            refused = False
            try:
                call(name)
            except StaleSequenceHandle:
                refused = True
            assert refused, f"{call} took a released row"
        assert self.kv.digest() == before

    def truncate(self) -> None:
        """Shorten a row."""
        name = self._pick("resident")
        length = len(self.tokens[name])
        cut = self.choose.between(min(self._lowest(name), length), length)
        self.kv.truncate(name, cut)
        self.model.truncate(name, cut)
        del self.tokens[name][cut:]

    def fork(self) -> None:
        """Branch a row."""
        count = self.choose.between(1, 2)
        name = self._pick("resident")
        length = len(self.tokens[name])
        low = min(self._lowest(name), length)
        at = self.choose.one((length, length, (low + length) // 2))
        new = self.kv.fork(name, count, at=at).tolist()
        self.model.fork(name, new, at)
        self._opened(new, self.windows[name])
        for handle in new:
            self.tokens[handle] = self.tokens[name][:at]

    def advance(self) -> None:
        """Give up pages in front of a window."""
        name = self._pick("windowed")
        assert self.kv.advance_window(name) == self.model.advance(name)

    # steps

    def whole_step(self) -> None:
        """Begin, plan, write, and end one way or another."""
        self._begin()
        if self.step is not None:
            self._emit()
            self._finish(self.choose.one(("commit", "commit", "commit", "commit", "accept", "rollback")))

    def begin(self) -> None:
        """Begin a step and leave it open, perhaps planned."""
        self._begin()
        if self.step is not None and self.choose.between(0, 1):
            self._emit()

    def finish(self) -> None:
        """End an open step."""
        ending = self.choose.one(("commit", "accept", "rollback"))
        assert self.step is not None
        self._finish(ending if self.step.state is StepState.EMITTED else "rollback")

    def _begin(self) -> None:
        names = self._some("resident", 0, 4)
        query = [self.choose.one(QUERIES) for _ in names]
        before = self.kv.digest()
        got = self.kv.begin_step(np.array(names, dtype=np.int64), query)
        expected = self.model.begin(names, query)
        if isinstance(got, (CapacityDeferred, UnserviceableRequest)):
            assert got == expected
            assert self.kv.digest() == before
            return
        assert not isinstance(expected, (CapacityDeferred, UnserviceableRequest))
        self.step = got
        copies = [] if got.copies is None else list(zip(got.copies.source, got.copies.target, strict=True))
        assert copies == [(source, target) for _, _, source, target in expected.copies]
        letter = self.choose.between(0, 1)
        self.drafts = {n: self.tokens[n] + [letter] * q for n, q in zip(names, query, strict=True)}

    def _emit(self) -> None:
        slot = self.choose.between(0, 1)
        assert self.step is not None
        assert self.model.step is not None
        names = self.step.handles.tolist()
        before = self.kv.digest()
        plan = self.step.plan(self.buffers[slot], allow_window_holes=True)
        fresh = self.step.plan(allow_window_holes=True)
        assert self.kv.digest() == before
        self.kv.require_current(plan)
        self.model.step.emitted = True
        width = fresh.block_table.shape[1]
        assert np.array_equal(plan.block_table[:, :width], fresh.block_table)
        assert (plan.block_table[:, width:] == -1).all()
        for name in ("slot_mapping", "cumulative_sequence_length", "past_seqlens", "context_lens"):
            assert np.array_equal(getattr(plan, name), getattr(fresh, name)), name
        assert plan.attention_metadata.tolist() == fresh.attention_metadata.tolist()
        self._padding_is_harmless(self.buffers[slot], plan.num_seqs, plan.num_tokens)
        self.cache.copy(self.step.copies)
        tokens = [self.drafts[name] for name in names]
        self.cache.write(plan, tokens)
        assert self.cache.mismatch(plan, tokens, [self.windows[name] for name in names]) is None

    @staticmethod
    def _padding_is_harmless(buffers: IndexPlanBuffers, rows: int, tokens: int) -> None:
        first = 0 if buffers.policy is PadPolicy.NULL_PAGE else -1
        assert (buffers.block_table[rows:, 0] == first).all()
        assert (buffers.block_table[rows:, 1:] == -1).all()
        assert (buffers.slot_mapping[tokens:] == -1).all()
        assert (buffers.cumulative_sequence_length[rows:] == tokens).all()
        assert not buffers.past_seqlens[rows:].any()
        assert not buffers.context_lens[rows:].any()

    def _finish(self, ending: str) -> None:
        step, self.step = self.step, None
        assert step is not None
        names, query = step.handles.tolist(), step.query_lens.tolist()
        if ending == "rollback":
            step.rollback()
            self.model.rollback()
            return
        accepted = query
        if ending == "accept":
            accepted = [self.choose.between(0, count) for count in query]
            step.commit_prefix(accepted)
        else:
            step.commit()
        self.model.commit(accepted)
        for name, count in zip(names, accepted, strict=True):
            self.tokens[name] = self.drafts[name][: len(self.tokens[name]) + count]

    def _last_launched(self) -> int:
        return self.model.launched if self.model.step is None else self.model.step.launched_before

    def complete(self) -> None:
        """Complete some steps in flight."""
        epoch = self.choose.between(self.model.completed + 1, self._last_launched())
        self.kv.complete(epoch)
        self.model.complete(epoch)

    # sharing

    def register(self) -> None:
        """Register a row's full pages."""
        name = self._pick("unwindowed")
        chain = self._chain(self.tokens[name])
        assert self.kv.register(name, chain) == self.model.register(name, chain.digests)

    def _hit(self, prompt: list[int]) -> PrefixHit:
        chain = self._chain(prompt)
        hit = self.kv.lookup_and_pin(chain)
        assert hit.pages.tolist() == self.model.find(chain.digests, len(prompt))
        assert hit.num_tokens <= len(prompt) - 1
        self.model.pin(hit.pages.tolist())
        return hit

    def lookup(self) -> None:
        """Look a prompt up and keep the hit."""
        prompt = self._prompt()
        self.hits.append((self._hit(prompt), prompt))

    def attach(self) -> None:
        """Attach a hit to an empty row."""
        hit, prompt = self.hits.pop()
        name = self._pick("empty")
        short = self.model.outstanding > self.model.available
        got = self.kv.attach(name, hit)
        if short:
            assert isinstance(got, CapacityDeferred)
            self._unpin(hit)
            return
        assert got is None
        self.model.attach(name, hit.pages.tolist())
        self.tokens[name] = prompt[: hit.num_tokens]

    def drop_hit(self) -> None:
        """Drop a hit."""
        self._unpin(self.hits.pop()[0])

    def unpin(self) -> None:
        """Drop transfer pins."""
        self._unpin(self.pinned.pop())

    def _unpin(self, pins: PagePins) -> None:
        pins.drop()
        self.model.unpin(pins.pages.tolist())

    def pin(self) -> None:
        """Pin a row's settled pages."""
        name = self._pick("resident")
        row = self.model.rows[name]
        expected = [row.cells[column] for column in range(row.first, row.settled // SIZE)]
        pins = self.kv.pin(name)
        assert pins.pages.tolist() == expected
        self.model.pin(expected)
        self.pinned.append(pins)

    def reset(self) -> None:
        """Forget all cached content."""
        self.kv.reset_prefix_cache()
        self.model.reset()

    def common_prefix(self) -> None:
        """Compare the common prefix of some rows."""
        names = self._some("resident", 1, 4)
        rows = [self.model.rows[name] for name in names]
        limit = min(row.length for row in rows) // SIZE
        expected = 0
        if not any(row.first for row in rows):
            while expected < limit and len({row.cells[expected] for row in rows}) == 1:
                expected += 1
        assert self.kv.common_prefix_blocks(names) == expected

    # swap

    def look(self) -> None:
        """Plan parts of some rows outside a step."""
        names = [name for name in self._some("resident", 1, 4) if not self.model.rows[name].first]
        query = [min(self.choose.one(QUERIES), len(self.tokens[name])) for name in names]
        requests = [PagedRequest(n, q, len(self.tokens[n])) for n, q in zip(names, query, strict=True)]
        plan = PagedIndexPlan.build(self.kv.view(), requests, max_blocks=COLUMNS, allow_shared_writes=True)
        slots = []
        for index, (name, count) in enumerate(zip(names, query, strict=True)):
            row = self.model.rows[name]
            cells = [row.cells.get(column, PAD) for column in range(COLUMNS)]
            assert plan.block_table[index].tolist() == cells
            slots += [
                row.cells[position // SIZE] * SIZE + position % SIZE
                for position in range(row.length - count, row.length)
            ]
        assert plan.slot_mapping.tolist() == slots
        assert plan.past_seqlens.tolist() == [
            len(self.tokens[n]) - q for n, q in zip(names, query, strict=True)
        ]

    def swap_out(self) -> None:
        """Move a row out."""
        name = self._pick("alone")
        plan = self.kv.swap_out(name)
        expected = self.model.swap_out(name)
        if isinstance(plan, (CapacityDeferred, UnserviceableRequest)):
            assert expected is None
            return
        assert plan.host_pages.tolist() == expected
        self.cache.swap(plan)
        self.swaps[name] = plan

    def swap_in(self) -> None:
        """Bring a row back."""
        name = self._pick("swapped")
        plan = self.kv.swap_in(name)
        expected = self.model.swap_in(name)
        if isinstance(plan, (CapacityDeferred, UnserviceableRequest)):
            assert plan == expected
            return
        assert plan.device_pages.tolist() == expected
        self.cache.swap(plan)
        self.swaps[name] = plan

    def finish_swap(self) -> None:
        """Confirm or cancel a swap."""
        confirm = self.choose.one((True, True, False))
        name, plan = self.swaps.popitem()
        (self.kv.confirm_swap if confirm else self.kv.cancel_swap)(plan)
        self.model.finish_swap(name, confirm=confirm)

    # what must hold

    def same_as_the_model(self) -> None:
        """Every page, queue, row and event is as the model says."""
        self.kv.check("full")
        model, state, view = self.model, self.kv._state, self.kv.view()
        assert state.pool.clean.entries().tolist() == model.clean
        assert state.pool.evictable.entries().tolist() == model.evictable
        assert state.ledger.outstanding == model.outstanding
        assert self.kv.pool_blocks == model.end
        for number, page in model.pages.items():
            claims = int(view.claims[number])
            assert STATE_NAMES[state.pool.state[number]] == page.state
            assert (claims & REF_MASK, (claims & HELD) // PIN) == (page.refs, page.pins)
            assert state.prefix.digest_of.get(number) == page.digest
        assert set(model.rows) == set(self.tokens)
        for name in self.tokens:
            row, slot = model.rows[name], name & SLOT_MASK
            cells = {column: int(page) for column, page in enumerate(view.cells[slot]) if page != -1}
            assert cells == row.cells
            assert (view.seq_len[slot], view.settled[slot]) == (row.length, row.settled)
            assert row.length == len(self.tokens[name])
        assert self.events == model.events

    def residents_read_their_own_history(self) -> None:
        """Every live position holds its own history."""
        if self.step is not None:
            return
        for name, tokens in self.tokens.items():
            row = self.model.rows[name]
            if row.where != "resident":
                continue
            history = history_of(tokens)
            first = max(row.first * SIZE, len(tokens) - self.windows[name] if self.windows[name] else 0)
            for position in range(first, len(tokens)):
                assert self.cache.read(row.cells[position // SIZE], position % SIZE) == history[position]
