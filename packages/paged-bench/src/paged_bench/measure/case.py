"""One case: make its inputs, check, count, time; then each peer likewise.

Invariant: nothing is timed whose output was not compared first, and what a set's output was when it was
checked it still is after the clock, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paged_cuda import PagedAttention

from paged_bench.measure.accounting import CallCounter
from paged_bench.measure.bench import Launch
from paged_bench.measure.check import Checker, WrongOutput
from paged_bench.measure.inputs import Footprint, InputMaker, InputSet, host_plans
from paged_bench.measure.peers import Peer, Unsuitable
from paged_bench.measure.peers.torch_tools import release
from paged_bench.measure.step import StepParts, run_step
from paged_bench.measure.subject import Measured, Runner, Subject
from paged_bench.measure.suite import CaseSpec
from paged_bench.measure.timing import Timer
from paged_bench.record import Correctness, PeerRow, Samples

_FEWEST_CALLS = 8


class CaseRun(Runner):
    """Measures one case."""

    def measure(self, spec: CaseSpec, before: Measured | None = None) -> Measured:
        """Check and time `spec`; `before` is what an earlier round found, which this one must find again.

        Raises:
            WrongOutput: The operator's output, or a later one, is wrong. Nothing of it was timed.
            DoesNotFit: The memory is too small.
            ArgumentMismatch: The kernel asked for refuses the case.
            DriverError: The driver fails.
        """
        bench = self._bench
        self._show("prepare")
        subject = Subject.prepared(bench, self._pool, spec, self._method)
        sets = self._sets(spec, subject.footprint)
        checker = Checker(bench, spec)
        self._show("check")
        allocations = self._run_counted(subject.operator, sets[0])
        digest = bench.digest(sets[0].output)
        correctness = self._checked(checker, sets[0], digest, before)
        self._show("time")
        series = self._time(subject, sets, digest)
        peers = tuple(self._peer(peer, spec, sets, checker) for peer in self._method.peers)
        return Measured(subject.case(bench, correctness, series, allocations, peers), digest)

    def _checked(
        self, checker: Checker, inputs: InputSet, digest: tuple[int, int], before: Measured | None
    ) -> Correctness | None:
        """Compare with the oracle, or in a later round with what was compared with it.

        Raises:
            WrongOutput: They differ.
        """
        if before is None:
            correctness = checker.rows(inputs)
            checker.appended(inputs)
            return correctness
        if digest != before.digest:
            raise WrongOutput("the output is not that of the round before")
        return before.case.correctness

    def _sets(self, spec: CaseSpec, footprint: Footprint) -> list[InputSet]:
        cache = self._pool.view(spec, footprint.cache)
        maker = InputMaker(self._bench, spec)
        plans = host_plans(spec, footprint.sets)
        return [maker.make(index, plan, cache) for index, plan in enumerate(plans)]

    def _run_counted(self, operator: PagedAttention, inputs: InputSet) -> int:
        """Run twice and return what the second run allocated; the first may still load code."""
        bench = self._bench
        run_step(operator, inputs, bench.stream.handle)
        bench.stream.synchronize()
        used = bench.used()
        with CallCounter(bench.device.driver) as counter:
            run_step(operator, inputs, bench.stream.handle)
        bench.stream.synchronize()
        if counter.waits:
            raise WrongOutput(f"a run waited for the GPU {counter.waits} times")
        return counter.allocations + int(bench.used() > used)

    def _time(
        self, subject: Subject, sets: Sequence[InputSet], digest: tuple[int, int]
    ) -> tuple[Samples, ...]:
        heavy = self._method.heavy(subject.spec)
        timer = Timer(self._bench, rest=self._method.rest if heavy else 0.0)
        parts, first = StepParts(subject.operator), sets[0]
        loop = list(sets) * max(1, math.ceil(_FEWEST_CALLS / len(sets)))
        attend = [parts.attend(one) for one in loop]
        step = [parts.step(one) for one in loop]
        # Attention alone rotates no queries: it finds those of the set that ran last, which is this one.
        self._bench.poison(first.output)
        main = timer.graph("attend+combine", attend)
        self._same(first, digest, "as the graph of attention alone leaves it")
        self._bench.poison(first.output)
        whole = timer.graph("step", step)
        self._same(first, digest, "as the graph leaves it")
        if self._method.delay:
            main = timer.graph("attend+combine", self._delayed(attend, main.median))
            whole = timer.graph("step", self._delayed(step, whole.median))
        series = [
            main,
            whole,
            timer.graph("append", [parts.append(one) for one in loop]),
            timer.graph("layer", [parts.layer(one) for one in loop]),
            timer.eager("attend+combine", attend),
        ]
        if heavy:
            series.append(timer.sustained("attend+combine, sustained", attend))
        if parts.has_schedule:
            series += [
                self._alone("schedule", [parts.schedule(one) for one in loop]),
                timer.graph("append+schedule", [parts.opening(one) for one in loop]),
            ]
        self._bench.poison(first.output)
        series += [timer.eager("step", step), timer.host("step", step)]
        self._same(first, digest, "as eager calls leave it")
        return tuple(series)

    def _alone(self, what: str, launches: Sequence[Launch]) -> Samples:
        """Time launches that may start before their predecessors end, each behind an ordinary empty kernel.

        What that kernel costs is taken off again.
        """
        empty = self._bench.kernels("bfloat16").spin(0)
        found = Timer(self._bench).graph(what, [_pair(empty, launch) for launch in launches])
        values = tuple(max(value - self._method.launch_us, 1e-3) for value in found.values)
        return found.model_copy(update={"values": values})

    def _delayed(self, launches: Sequence[Launch], microseconds: float) -> list[Launch]:
        method = self._method
        added = max(0.0, method.delay * microseconds - method.launch_us)
        spin = self._bench.kernels("bfloat16").spin(int(added * method.cycles_per_us))
        return [_pair(launch, spin) for launch in launches]

    def _same(self, inputs: InputSet, digest: tuple[int, int], when: str) -> None:
        """Compare the checked set's output with what it was.

        Raises:
            WrongOutput: A bit differs.
        """
        if self._bench.digest(inputs.output) != digest:
            raise WrongOutput(f"the output that was checked has other bits {when}")

    def _peer(self, peer: Peer, spec: CaseSpec, sets: Sequence[InputSet], checker: Checker) -> PeerRow:
        self._show(peer.title)
        try:
            return self._timed_peer(peer, spec, sets, checker)
        except (Unsuitable, WrongOutput) as reason:
            return PeerRow(peer=peer.title, failed=_line(reason))
        except Exception as error:  # whatever another library raises is a row that says so
            return PeerRow(peer=peer.title, failed=f"{type(error).__name__}: {_line(error)}")
        finally:
            release()

    def _timed_peer(self, peer: Peer, spec: CaseSpec, sets: Sequence[InputSet], checker: Checker) -> PeerRow:
        self._bench.poison(sets[0].output)  # a peer that writes there must not be judged by our own values
        calls = peer.prepare(self._bench, spec, sets)
        self._bench.stream.synchronize()
        correctness = checker.rows(sets[0], calls.output, rotary=False, factor=calls.tolerance_factor)
        timer, loop = Timer(self._bench), [*calls.launches]
        loop *= max(1, math.ceil(_FEWEST_CALLS / len(loop)))
        series = [timer.eager("attend+combine", loop)]
        if calls.capture is not None:
            series.insert(0, timer.graph("attend+combine", loop, capture=calls.capture))
        name = f"{peer.title} ({calls.label})" if calls.label else peer.title
        return PeerRow(peer=name, correctness=correctness, series=tuple(series))


def _pair(first: Launch, second: Launch) -> Launch:
    def launch(stream: int) -> None:
        first(stream)
        second(stream)

    return launch


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:240] or type(error).__name__
