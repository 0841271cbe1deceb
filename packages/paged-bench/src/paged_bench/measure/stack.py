"""A whole model's attention as one step: every layer with a cache of its own, all in one graph.

The first layer divides the work, the others use its division, as an engine would. Weights are not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from paged_cuda import DeviceArray

from paged_bench.measure.accounting import CallCounter
from paged_bench.measure.bench import Launch
from paged_bench.measure.check import Checker, Row, WrongOutput, sampled_rows
from paged_bench.measure.inputs import Footprint, InputMaker, InputSet, layer_plan
from paged_bench.measure.step import run_step
from paged_bench.measure.subject import Measured, Runner, Subject
from paged_bench.measure.suite import CaseSpec
from paged_bench.measure.timing import Timer
from paged_bench.record import Correctness

_CHECKERS = 8  # rows under comparison at once; the oracle has threads of its own


class StackRun(Runner):
    """Measures a stack of layers."""

    def measure(self, spec: CaseSpec, before: Measured | None = None) -> Measured:
        """Check the first and the last row of every layer, then time the step.

        Raises:
            WrongOutput: A layer's output is wrong. Nothing was timed.
            DoesNotFit: The memory is too small.
            DriverError: The driver fails.
        """
        bench = self._bench
        self._show("prepare")
        subject = Subject.prepared(bench, self._pool, spec, self._method)
        operator, layers = subject.operator, self._layers(spec, subject.footprint)

        def step(stream: int) -> None:
            for index, layer in enumerate(layers):
                run_step(operator, layer, stream, reuse_schedule=index > 0)

        self._show("check")
        step(bench.stream.handle)
        bench.stream.synchronize()
        with CallCounter(bench.device.driver) as counter:
            step(bench.stream.handle)
        bench.stream.synchronize()
        digests = [bench.digest(layer.output) for layer in layers]
        correctness: Correctness | None
        if before is None:
            correctness = self._check(spec, layers, digests)
        elif digests[0] != before.digest:
            raise WrongOutput("the output is not that of the round before")
        else:
            correctness = before.case.correctness
        self._show("time")
        launches: Sequence[Launch] = [step]
        timer = Timer(bench)
        for layer in layers:
            bench.poison(layer.output)
        series = [timer.graph("step", launches)]
        if [bench.digest(layer.output) for layer in layers] != digests:
            raise WrongOutput("the outputs that were checked have other bits as the graph leaves them")
        series.append(timer.eager("step", launches))
        case = subject.case(bench, correctness, tuple(series), counter.allocations)
        return Measured(case, digests[0])

    def _layers(self, spec: CaseSpec, footprint: Footprint) -> list[InputSet]:
        cache = self._pool.view(spec, footprint.cache)
        pages = cache.shape[0] // spec.layers
        maker, plan = InputMaker(self._bench, spec), layer_plan(spec)
        layers = []
        for index in range(spec.layers):
            pointer = cache.pointer + index * pages * spec.page_bytes
            own = DeviceArray(
                pointer, (pages, *cache.shape[1:]), cache.strides, cache.dtype, cache.ordinal, cache.owner
            )
            layers.append(maker.make(index, plan, own))
        return layers

    def _check(
        self, spec: CaseSpec, layers: Sequence[InputSet], digests: Sequence[tuple[int, int]]
    ) -> Correctness:
        for index, (_, wild) in enumerate(digests):
            if wild:
                raise WrongOutput(f"{wild} output values of layer {index} are not finite")
        rows = sampled_rows(spec)
        ends: list[Row] = [rows[0]] if len(rows) == 1 else [rows[0], rows[-1]]
        checker = Checker(self._bench, spec, most_heads=4)

        def check(index: int) -> Correctness:
            try:
                return checker.rows(layers[index], rows=ends)
            except WrongOutput as error:
                raise WrongOutput(f"layer {index}: {error}") from error

        with ThreadPoolExecutor(_CHECKERS) as pool:
            found = list(pool.map(check, range(len(layers))))
        return Correctness(
            reference=f"paged_oracle on the first and the last row of each of {len(layers)} layers",
            relative_error=max(one.relative_error for one in found),
            tolerance=found[0].tolerance,
        )
