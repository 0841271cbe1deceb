"""The two ways to time: replay of a graph, and eager calls, each between events of one stream.

Invariant: nothing waits between the first and the last sample of a block. A launch between two waits finds a
GPU that slowed down, and reads 15 to 20 % low on an H200.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from paged_cuda import CapturedGraph

from paged_bench.measure.bench import Bench, Launch
from paged_bench.record import Samples

_WARMUPS = 2
_TARGET_US = 40_000.0  # of one block of replays
_FEWEST, _MOST = 5, 15  # samples of a block
_SUSTAINED_US, _MOST_SUSTAINED = 200_000.0, 2000  # of load before a sustained sample, and its replays
_HOST_CALLS = 16  # of one sample by the host's clock
_SHORT_US = 250.0  # a replay below this repeats its calls until it is longer


class Replayable(Protocol):
    """A captured graph, of whatever library."""

    def replay(self) -> None:
        """Launch it."""
        ...


Capture = Callable[[Sequence[Launch]], Replayable]


class Timer:
    """Times launches in the stream of a bench.

    Args:
        bench: The instruments.
        rest: Seconds that the GPU rests before each series, so that all begin with the same clocks.
        sleep: Waits.
    """

    def __init__(
        self, bench: Bench, *, rest: float = 0.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._bench = bench
        self._rest = rest
        self._sleep = sleep

    def capture(self, launches: Sequence[Launch]) -> Replayable:
        """Record launches into a graph of our own."""
        stream = self._bench.stream
        with CapturedGraph(stream) as graph:
            self._bench.launch(*launches)
        return graph

    def graph(self, what: str, launches: Sequence[Launch], *, capture: Capture | None = None) -> Samples:
        """Time the replay of all launches, in order, as one graph; samples are microseconds a launch.

        A short graph is captured again with its launches repeated, so that what a replay itself costs is
        small beside it.
        """
        self._pause()
        record = capture or self.capture
        replayable = record(launches)
        first = self._spread(replayable.replay, _WARMUPS)[-1]
        calls = list(launches)
        if first < _SHORT_US:
            calls *= math.ceil(_SHORT_US / max(first, _SHORT_US / 32))
            replayable = record(calls)
            first = self._spread(replayable.replay, _WARMUPS)[-1]
        times = self._spread(replayable.replay, _count(first))
        return self._samples(what, "graph", times, len(calls), _WARMUPS)

    def sustained(self, what: str, launches: Sequence[Launch]) -> Samples:
        """Time replays after so long a load that power decides the clocks; the last samples of many."""
        replayable = self.capture(launches)
        first = self._spread(replayable.replay, _WARMUPS)[-1]
        count = max(_FEWEST, min(_MOST_SUSTAINED, math.ceil(_SUSTAINED_US / max(first, 1.0))))
        times = self._spread(replayable.replay, count + _FEWEST)[-_FEWEST:]
        return self._samples(what, "graph", times, len(launches), (_WARMUPS + count) * len(launches))

    def eager(self, what: str, launches: Sequence[Launch]) -> Samples:
        """Time single calls; what the host takes to launch is in it wherever that is longer."""
        self._pause()
        handle, push = self._bench.stream.handle, self._bench.device
        turn = iter(range(1 << 30))

        def call() -> None:
            with push:
                launches[next(turn) % len(launches)](handle)

        first = self._spread(call, _WARMUPS + 1)[-1]
        times = self._spread(call, max(_count(first), _MOST))
        return self._samples(what, "eager", times, 1, _WARMUPS + 1)

    def host(self, what: str, launches: Sequence[Launch]) -> Samples:
        """Time the host's part of eager calls by its own clock, some calls at a time."""
        handle, times = self._bench.stream.handle, []
        chosen = [launches[index % len(launches)] for index in range(_HOST_CALLS)]
        for _ in range(_WARMUPS + _MOST):
            # A full queue would make the host wait for the GPU.
            self._bench.stream.synchronize()
            begin = time.perf_counter_ns()
            for launch in chosen:
                launch(handle)
            times.append((time.perf_counter_ns() - begin) / 1e3)
        self._bench.stream.synchronize()
        return self._samples(what, "wall", times[_WARMUPS:], _HOST_CALLS, _WARMUPS * _HOST_CALLS)

    def _pause(self) -> None:
        if self._rest:
            self._bench.stream.synchronize()
            self._sleep(self._rest)

    def _samples(self, what: str, timing: str, times: list[float], calls: int, warmups: int) -> Samples:
        values = tuple(max(value / calls, 1e-3) for value in times)
        return Samples(
            what=what,
            timing=timing,  # type: ignore[arg-type] # a literal, which pydantic checks here
            values=values,
            blocks=(len(values),),
            calls=calls,
            warmups=warmups,
            l2="cold",
        )

    def _spread(self, call: Callable[[], None], count: int) -> list[float]:
        """Call `count` times with an event around each and return microseconds between the events."""
        bench = self._bench
        counters, handle = bench.counters, bench.stream.handle
        with bench.device:
            events = [counters.create_event() for _ in range(count + 1)]
            try:
                counters.record_event(events[0], handle)
                for event in events[1:]:
                    call()
                    counters.record_event(event, handle)
                bench.device.driver.synchronize(handle)
                return [counters.elapsed_us(*pair) for pair in pairwise(events)]
            finally:
                for event in events:
                    counters.destroy_event(event)


def _count(microseconds: float) -> int:
    return max(_FEWEST, min(_MOST, int(_TARGET_US / max(microseconds, 1e-3))))


def joined(first: Samples, later: Samples) -> Samples:
    """Return one series of two that were taken at different moments; their blocks stay apart."""
    blocks = (*first.blocks, *later.blocks)
    return first.model_copy(update={"values": (*first.values, *later.values), "blocks": blocks})
