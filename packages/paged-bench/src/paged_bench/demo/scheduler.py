"""Continuous batching over the page authority: who is admitted, and which tokens a step runs.

Invariants: requests are admitted in the order of their arrival, never past one that has to wait; a
sequence is admitted only with pages for its whole need, so that no later step can run out; a sequence
advances only after its step was committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from paged_kv import CapacityDeferred, KVCacheManager, PagedIndexPlan, StepTransaction, UnserviceableRequest

from paged_bench.demo.requests import Request, Sequence

NextTokens = Callable[[PagedIndexPlan, NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""(plan, token_ids (tokens,), rows (n,)) -> the next token id after each of the rows, (n,)."""


@dataclass(frozen=True)
class Limits:
    """What one step may hold: `sequences` at most, `tokens` (at least as many) at most."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class StepRecord:
    """What one step did.

    Attributes:
        step: Its number; arrivals are counted in these.
        prefill_tokens: Prompt tokens run, beyond the one that yields the first new token.
        decode_tokens: Tokens generated.
        running: Sequences in the batch.
        waiting: Requests that had arrived and were not admitted.
        deferred: Whether admission waited for pages.
        mixed: Whether the step held a prefill and a decode.
        pages: The distinct pages of each sequence in the batch, by request index.
        seconds: Wall time.
    """

    step: int
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    deferred: bool
    mixed: bool
    pages: dict[int, frozenset[int]]
    seconds: float


class Scheduler:
    """Serves requests until all are finished.

    Args:
        kv: The page authority, with room for every single request.
        requests: All requests; each is served from its arrival step on.
        limits: What one step may hold.
        stop_ids: Token ids that end a sequence; the token itself is kept.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        requests: Ordered[Request],
        limits: Limits,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.sequences = [Sequence(request) for request in requests]
        self._kv = kv
        self._limits = limits
        self._stop_ids = stop_ids
        arrival_order = sorted(self.sequences, key=lambda sequence: sequence.request.arrival)
        self._to_come = deque(arrival_order)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    def steps(self, next_tokens: NextTokens) -> Iterator[StepRecord]:
        """Run step after step; the sequences' state is current whenever a record is yielded."""
        step = 0
        while self._to_come or self._waiting or self._running:
            if not self._waiting and not self._running:
                step = max(step, self._to_come[0].request.arrival)
            self._arrive(step)
            deferred = self._admit()
            yield self._run(step, deferred, next_tokens)
            step += 1

    def _arrive(self, step: int) -> None:
        while self._to_come and self._to_come[0].request.arrival <= step:
            self._waiting.append(self._to_come.popleft())

    def _admit(self) -> bool:
        """Admit from the head of the queue; returns whether the head waits for pages."""
        while self._waiting and len(self._running) < self._limits.sequences:
            outcome = self._kv.admit([self._waiting[0].request.cache_tokens])
            if isinstance(outcome, CapacityDeferred):
                return True
            if isinstance(outcome, UnserviceableRequest):
                raise AssertionError(f"a request was let in that the pool can never hold: {outcome}")
            sequence = self._waiting.popleft()
            sequence.handle = int(outcome[0])
            self._running.append(sequence)
        return False

    def _share(self) -> list[int]:
        """Tokens of each running sequence in this step: one each, the rest to prefills in order."""
        spare = self._limits.tokens - len(self._running)
        counts = []
        for sequence in self._running:
            extra = min(sequence.pending - 1, spare)
            spare -= extra
            counts.append(1 + extra)
        return counts

    def _run(self, step: int, deferred: bool, next_tokens: NextTokens) -> StepRecord:
        began = perf_counter()
        batch, counts = list(self._running), self._share()
        ends = np.cumsum(counts)
        samples = np.array([count == sequence.pending for sequence, count in zip(batch, counts, strict=True)])
        decoding = sum(bool(sequence.new_ids) for sequence in batch)
        token_ids = [
            token
            for sequence, count in zip(batch, counts, strict=True)
            for token in sequence.next_tokens(count)
        ]
        transaction = self._kv.begin_step(self._handles(batch), counts)
        if not isinstance(transaction, StepTransaction):
            raise AssertionError(f"an admitted sequence found no page: {transaction}")
        with transaction:
            plan = transaction.plan()
            pages = _pages(batch, plan)
            chosen = next_tokens(plan, np.array(token_ids, np.int64), (ends - 1)[samples])
            transaction.commit()
        # A backend has finished its work when it returns.
        self._kv.complete(transaction.epoch)
        self._advance(batch, counts, samples, chosen)
        return StepRecord(
            step=step,
            prefill_tokens=sum(counts) - int(samples.sum()),
            decode_tokens=int(samples.sum()),
            running=len(batch),
            waiting=len(self._waiting),
            deferred=deferred,
            mixed=0 < decoding < len(batch),
            pages=pages,
            seconds=perf_counter() - began,
        )

    def _advance(
        self, batch: list[Sequence], counts: list[int], samples: NDArray[np.bool_], chosen: NDArray[np.int64]
    ) -> None:
        tokens = iter(chosen.tolist())
        for sequence, count, sampled in zip(batch, counts, samples.tolist(), strict=True):
            sequence.cached += count
            if sampled:
                sequence.new_ids.append(next(tokens))
                last = sequence.new_ids[-1]
                sequence.finished = (
                    last in self._stop_ids or len(sequence.new_ids) == sequence.request.max_new
                )
        done = [sequence for sequence in batch if sequence.finished]
        if done:
            self._kv.release(self._handles(done))
        for sequence in done:
            sequence.handle = None
        self._running = [sequence for sequence in batch if not sequence.finished]

    @staticmethod
    def _handles(batch: list[Sequence]) -> NDArray[np.int64]:
        return np.array([sequence.handle for sequence in batch], np.int64)


def _pages(batch: list[Sequence], plan: PagedIndexPlan) -> dict[int, frozenset[int]]:
    """The pages of each sequence, as the plan that the op reads shows them."""
    return {
        sequence.request.index: frozenset(row[row >= 0].tolist())
        for sequence, row in zip(batch, plan.block_table, strict=False)
    }
