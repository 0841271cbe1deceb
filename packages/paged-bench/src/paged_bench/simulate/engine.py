"""A continuous batch over the page authority, with a clock instead of a model.

Requests start in order of arrival. A step writes one token of each decoding row and as many prompt tokens as
the step's budget allows; it takes ``base + per_token * tokens + per_context * tokens read`` seconds. No
tensor is touched.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from paged_kv import (
    CacheKey,
    CapacityDeferred,
    KVCacheManager,
    KVCacheStats,
    PageGeometry,
    PreemptedSequence,
    PrefixChain,
    PrefixHit,
    StepTransaction,
    UnserviceableRequest,
)

from paged_bench.simulate.trace import NO_GROUP, Trace

Int64Array = npt.NDArray[np.int64]
KEY = CacheKey(model="simulated", dtype="none", layout="LATENT")
MAX_SAMPLES = 2_048


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of a step: a fixed part, one for each token written, and one for each token of context read."""

    base: float = 8e-3
    per_token: float = 20e-6
    per_context: float = 30e-9

    def step(self, tokens: int, context: int) -> float:
        """How long a step takes."""
        return self.base + self.per_token * tokens + self.per_context * context


@dataclass(frozen=True, slots=True)
class Engine:
    """The pool and the limits of the batch.

    `optimistic` promises a request its prompt only, so that more run at once and some may have to give way.
    """

    blocks: int = 4_096
    block_size: int = 16
    max_batch: int = 256
    step_tokens: int = 2_048
    watermark: int = 0
    prefix_cache: bool = True
    optimistic: bool = False


@dataclass(slots=True)
class Samples:
    """Moments of the run, thinned by half whenever there are too many."""

    time: list[float] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    every: int = 1
    seen: int = 0

    def add(self, time: float, stats: KVCacheStats, waiting: int, running: int) -> None:
        """Keep this moment, if it is its turn."""
        self.time.append(time)
        self.used.append(stats.num_pages_in_use + stats.num_pages_fenced)
        self.cached.append(stats.num_pages_evictable)
        self.waiting.append(waiting)
        self.running.append(running)
        if len(self.time) >= MAX_SAMPLES:
            self.every *= 2
            for values in (self.time, self.used, self.cached, self.waiting, self.running):
                del values[::2]

    def is_due(self) -> bool:
        """Whether the next moment is to be kept."""
        self.seen += 1
        return self.seen % self.every == 0


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What happened.

    Attributes:
        seconds: simulated time until the last request ended.
        finished: requests that ended.
        refused: requests that can never fit.
        steps: steps of the batch.
        tokens: tokens written.
        queue_waits: ``(finished + refused,)`` float64 seconds from arrival to start, nan for refused ones.
        latencies: float64 seconds from arrival to the last token, nan for refused ones.
        starts: starts and restarts of requests.
        hits: those that found cached tokens.
        hit_tokens: tokens that they did not have to compute.
        deferred_steps: steps at whose beginning somebody waited for pages.
        samples: moments of the run.
        stats: the authority's counters at the end.
        usable: pages that can hold tokens.
    """

    seconds: float
    finished: int
    refused: int
    steps: int
    tokens: int
    queue_waits: npt.NDArray[np.float64]
    latencies: npt.NDArray[np.float64]
    starts: int
    hits: int
    hit_tokens: int
    deferred_steps: int
    samples: Samples
    stats: KVCacheStats
    usable: int


class Simulation:
    """One run of a trace."""

    def __init__(self, trace: Trace, engine: Engine, times: TimeModel) -> None:
        self.trace, self.engine, self.times = trace, engine, times
        geometry = PageGeometry(engine.blocks + 1, engine.block_size)
        self.totals = trace.prompt + trace.output
        columns = min(engine.blocks, int(geometry.blocks_for(int(self.totals.max()))))
        self.kv = KVCacheManager(
            geometry,
            max_sequences=engine.max_batch,
            max_blocks_per_sequence=columns,
            watermark=engine.watermark,
        )
        self.chains: dict[tuple[int, int], PrefixChain] = {}
        self.handles = np.empty(0, dtype=np.int64)
        self.request = np.empty(0, dtype=np.int64)
        self.prompt_left = np.empty(0, dtype=np.int64)
        self.output_left = np.empty(0, dtype=np.int64)
        self.context = np.empty(0, dtype=np.int64)
        self.preempted: deque[tuple[int, PreemptedSequence, int]] = deque()
        self.started = np.full(len(trace), np.nan)
        self.ended = np.full(len(trace), np.nan)
        self.clock = float(trace.arrival[0])
        self.arrived = self.refused = self.finished = self.deferred_steps = self.steps = self.tokens = 0
        self.starts = self.hits = self.hit_tokens = 0
        self.queue: deque[int] = deque()
        self.samples = Samples()
        self.last_epoch = 0

    def run(self) -> Outcome:
        """Replay the whole trace."""
        while self.finished + self.refused < len(self.trace):
            self._arrive()
            self._start()
            if len(self.handles):
                self._step()
            else:
                self._settle()
        self._settle()
        self.kv.check("full")
        stats = self.kv.stats()
        self.samples.add(self.clock, stats, 0, 0)
        return Outcome(
            seconds=self.clock,
            finished=self.finished,
            refused=self.refused,
            steps=self.steps,
            tokens=self.tokens,
            queue_waits=self.started - self.trace.arrival,
            latencies=self.ended - self.trace.arrival,
            starts=self.starts,
            hits=self.hits,
            hit_tokens=self.hit_tokens,
            deferred_steps=self.deferred_steps,
            samples=self.samples,
            stats=stats,
            usable=self.engine.blocks,
        )

    def _settle(self) -> None:
        """Complete the step in flight, so that the pages that wait for it are free."""
        if self.last_epoch:
            self.kv.complete(self.last_epoch)
            self.last_epoch = 0

    def _arrive(self) -> None:
        if not len(self.handles) and not self.queue and not self.preempted:
            self.clock = max(self.clock, float(self.trace.arrival[self.arrived]))
        stop = int(np.searchsorted(self.trace.arrival, self.clock, side="right"))
        self.queue.extend(range(self.arrived, stop))
        self.arrived = stop

    def _start(self) -> None:
        """Start whoever fits, first those that gave way, then in order of arrival."""
        new: list[tuple[int, int, int, int]] = []
        while len(self.handles) + len(new) < self.engine.max_batch:
            started = self._resume() if self.preempted else self._admit() if self.queue else None
            if started is None:
                break
            new += [started] if started else []
        if new:
            self._add(np.array(new, dtype=np.int64))

    def _admit(self) -> tuple[int, int, int, int] | tuple[()] | None:
        """Handle, request, prompt and output tokens to go; () when it never fits; None when it must wait."""
        index = self.queue[0]
        total, prompt = int(self.totals[index]), int(self.trace.prompt[index])
        chain = self._chain(index)
        hit = None if chain is None else self.kv.lookup_and_pin(chain)
        promise = prompt if self.engine.optimistic else total
        got = self.kv.admit(total, promise_lens=promise, hits=[hit])
        if isinstance(got, (CapacityDeferred, UnserviceableRequest)):
            if hit is not None:
                hit.drop()
            if isinstance(got, CapacityDeferred):
                self.deferred_steps += 1
                return None
            self.queue.popleft()
            self.refused += 1
            return ()
        self.queue.popleft()
        self.started[index] = self.clock
        return int(got[0]), index, prompt - self._known(hit), int(self.trace.output[index])

    def _resume(self) -> tuple[int, int, int, int] | None:
        index, sequence, output_left = self.preempted[0]
        chain = self._chain(index)
        hit = None if chain is None else self.kv.lookup_and_pin(chain)
        got = self.kv.resume(sequence, int(self.totals[index]), hit)
        if isinstance(got, (CapacityDeferred, UnserviceableRequest)):
            if hit is not None:
                hit.drop()
            self.deferred_steps += 1
            return None
        self.preempted.popleft()
        written = int(self.totals[index]) - output_left
        return int(got[0]), index, written - self._known(hit), output_left

    def _known(self, hit: PrefixHit | None) -> int:
        """Tokens that a row starts with; counts the start."""
        known = 0 if hit is None else hit.num_tokens
        self.starts += 1
        self.hits += known > 0
        self.hit_tokens += known
        return known

    def _chain(self, index: int) -> PrefixChain | None:
        """The digests of a prompt's common prefix; one token more lets its last full block hit."""
        group, prefix = int(self.trace.group[index]), int(self.trace.prefix[index])
        if not self.engine.prefix_cache or group == NO_GROUP or prefix >= int(self.trace.prompt[index]):
            return None
        if prefix > self.engine.blocks * self.engine.block_size:  # it never fits: spare the hashing
            return None
        chain = self.chains.get((group, prefix))
        if chain is None:
            chain = PrefixChain(KEY, self.engine.block_size)
            tokens = np.random.default_rng([group, 1]).integers(0, 2**31 - 1, prefix + 1)
            chain.extend(tokens)
            self.chains[group, prefix] = chain
        return chain

    def _add(self, new: Int64Array) -> None:
        handles, request, prompt_left, output_left = new.T
        self.handles = np.concatenate((self.handles, handles))
        self.request = np.concatenate((self.request, request))
        self.prompt_left = np.concatenate((self.prompt_left, prompt_left))
        self.output_left = np.concatenate((self.output_left, output_left))
        known = self.totals[request] - output_left - prompt_left
        self.context = np.concatenate((self.context, known))

    def _step(self) -> None:
        query = self._query()
        step = self.kv.begin_step(self.handles, query)
        while not isinstance(step, StepTransaction):
            if self.last_epoch:
                self._settle()
            else:
                self._give_way()
                query = self._query()
            step = self.kv.begin_step(self.handles, query)
        step.commit()
        self._settle()
        self.last_epoch = step.epoch
        self.context += query
        self.clock += self.times.step(step.num_tokens, int(self.context.sum()))
        self.steps += 1
        self.tokens += step.num_tokens
        self._count(query)
        if self.samples.is_due():
            waiting = len(self.queue) + len(self.preempted)
            self.samples.add(self.clock, self.kv.stats(), waiting, len(self.handles))

    def _query(self) -> Int64Array:
        """One token of each decoding row; prompts share what is left of the budget, earliest first."""
        prefilling = self.prompt_left > 0
        budget = max(1, self.engine.step_tokens - int(np.count_nonzero(~prefilling)))
        before = np.cumsum(self.prompt_left) - self.prompt_left
        part = np.clip(budget - before, 0, self.prompt_left)
        return np.where(prefilling, part, 1)

    def _count(self, query: Int64Array) -> None:
        prefilling = self.prompt_left > 0
        self.prompt_left -= np.where(prefilling, query, 0)
        ready = prefilling & (self.prompt_left == 0)
        if ready.any() and self.engine.prefix_cache:
            for handle, index in zip(self.handles[ready].tolist(), self.request[ready].tolist(), strict=True):
                chain = self._chain(index)
                if chain is not None:
                    self.kv.register(handle, chain)
        # The step that ends a prompt gives the first output token; each later one gives one more.
        self.output_left -= ready | ~prefilling
        done = self.output_left <= 0
        if done.any():
            self.ended[self.request[done]] = self.clock
            self.finished += int(np.count_nonzero(done))
            self.kv.release(self.handles[done])
            self._keep(~done)

    def _give_way(self) -> None:
        """Preempt the row that started last."""
        index = int(self.request[-1])
        [left] = self.kv.preempt(self.handles[-1:])
        self.preempted.appendleft((index, left, int(self.output_left[-1])))
        self._keep(np.arange(len(self.handles)) < len(self.handles) - 1)

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        self.handles, self.request = self.handles[kept], self.request[kept]
        self.prompt_left, self.output_left = self.prompt_left[kept], self.output_left[kept]
        self.context = self.context[kept]
