"""One capture, many lengths: a replay equals an eager run bit for bit, and the oracle within tolerance."""

import ctypes
from collections import Counter
from typing import Any

import numpy as np
import pytest
from paged_cuda import (
    Bounds,
    CapturedGraph,
    Device,
    DeviceArray,
    DeviceIndexPlan,
    NotPrepared,
    PagedAttention,
    Stream,
)
from parity import (
    Result,
    assert_close,
    bits,
    call_of,
    paths_for,
    poison_workspace,
    poisoned,
    reference,
    run_with,
    upload,
)
from problems import Case, Problem, build

BOUNDS = Bounds(max_batch=6, max_tokens=24, max_context=512)
SHAPE: dict[str, Any] = {"heads": 8, "head_size": 192, "v_head_size": 128, "block_size": 16, "slots": True}
# Empty, growing past page and tile edges, mixed prefill and decode, shrinking back.
STEPS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1, 1, 1, 1, 1, 1), (0, 14, 15, 16, 30, 31)),
    ((), ()),
    ((1,), (0,)),
    ((1, 1), (15, 63)),
    ((1, 1, 1), (16, 64, 127)),
    ((4, 1, 3, 0, 2), (61, 200, 0, 9, 300)),
    ((20, 1, 1, 1, 1), (0, 400, 33, 65, 128)),
    ((0, 0, 0), (1, 2, 3)),
    ((1, 2, 1, 1), (17, 18, 48, 47)),
    ((8, 8, 8), (100, 0, 500)),
    ((1, 1, 1, 1, 1, 1), (510, 0, 300, 511, 63, 64)),
    ((1,), (3,)),
]


def steps(dtype: str) -> list[Problem]:
    return [
        build(Case(q, past, dtype, seed=index, spare_columns=0, **SHAPE))
        for index, (q, past) in enumerate(STEPS)
    ]


class Slots:
    """Device memory at the largest extents that one captured step reads and writes."""

    def __init__(self, problem: Problem, stream: Stream, blocks: int = 160) -> None:
        case = problem.case
        self.stream = stream
        self.plan = DeviceIndexPlan(BOUNDS, case.block_size, device=stream.device)
        tokens, dtype = BOUNDS.max_tokens, case.dtype
        self.arrays: dict[str, DeviceArray] = {
            "query": poisoned((tokens, case.heads * case.head_size), dtype, stream),
            "key": poisoned((tokens, case.head_size), dtype, stream),
            "key_cache": poisoned((blocks, case.block_size, 1, case.head_size), dtype, stream),
            "cos_cache": poisoned((BOUNDS.max_context, case.rotary_dim // 2), dtype, stream),
            "sin_cache": poisoned((BOUNDS.max_context, case.rotary_dim // 2), dtype, stream),
        }
        self.output = poisoned((tokens, case.heads * case.v_head_size), dtype, stream)
        self.lse = poisoned((tokens, case.heads), "float32", stream)
        full = build(Case((1,), (BOUNDS.max_context - 1,), dtype, **SHAPE))
        for name in ("cos_cache", "sin_cache"):
            self.write(name, full.inputs[name])

    def write(self, name: str, values: Any) -> None:
        source = np.ascontiguousarray(values)
        if source.nbytes:
            with self.stream.device as device:
                device.driver.copy_to_device(
                    self.arrays[name].pointer, source.ctypes.data, source.nbytes, self.stream.handle
                )
                device.driver.synchronize(self.stream.handle)

    def load(self, problem: Problem) -> None:
        """Poison everything, then place one step's values."""
        for array in (
            self.arrays["query"],
            self.arrays["key"],
            self.arrays["key_cache"],
            self.output,
            self.lse,
        ):
            with self.stream.device as device:
                device.driver.fill(array.pointer, 0xFF, array.nbytes, self.stream.handle)
        for name in ("query", "key", "key_cache"):
            self.write(name, problem.inputs[name])
        self.plan.upload(_HostPlan(problem), self.stream)

    def run(self, op: PagedAttention) -> None:
        op.run(**self.arrays, plan=self.plan, output=self.output, lse=self.lse, stream=self.stream)

    def read(self, problem: Problem) -> tuple[Result, Any]:
        """Return the live part, and what lies behind it."""
        tokens, blocks = problem.inputs["query"].shape[0], problem.inputs["key_cache"].shape[0]
        output, lse = self.output.to_numpy(self.stream), self.lse.to_numpy(self.stream)
        cache = self.arrays["key_cache"].to_numpy(self.stream)
        assert (bits(cache[blocks:]) == 0xFFFF).all()
        assert not bits(output[tokens:]).any()
        assert np.isneginf(lse[tokens:]).all()
        return Result(output[:tokens], cache[:blocks], lse[:tokens]), output


class _HostPlan:
    def __init__(self, problem: Problem) -> None:
        for name in ("block_table", "slot_mapping", "cumulative_sequence_length", "past_seqlens"):
            setattr(self, name, problem.inputs[name])


def assert_same(got: Result, want: Result) -> None:
    np.testing.assert_array_equal(bits(got.output), bits(want.output))
    np.testing.assert_array_equal(bits(got.cache), bits(want.cache))
    np.testing.assert_array_equal(got.lse.view(np.uint32), want.lse.view(np.uint32))


def prepared(problem: Problem, stream: Stream, kernel: str) -> PagedAttention:
    return PagedAttention(call_of(problem), BOUNDS, device=stream.device, kernel=kernel).prepare()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_replays_equal_eager_runs_and_the_oracle(dtype: str, stream: Stream) -> None:
    problems = steps(dtype)
    for kernel in paths_for(call_of(problems[0]), stream.device):
        op = prepared(problems[0], stream, kernel)
        slots = Slots(problems[0], stream)
        slots.load(problems[0])
        with CapturedGraph(stream) as graph:
            slots.run(op)
        for problem in problems:
            slots.load(problem)
            slots.run(op)
            eager, _ = slots.read(problem)
            for _ in range(3):
                slots.load(problem)
                poison_workspace(op, stream)
                graph.replay()
                replayed, _ = slots.read(problem)
                assert_same(replayed, eager)
            if problem.case.q:  # a batch of no sequence is a plan here, but no call for the oracle
                assert_close("replays over changing lengths", kernel, replayed, reference(problem))
        graph.close()


def test_one_graph_follows_a_sequence_through_every_edge(stream: Stream) -> None:
    """Lengths 1 to 140 of one sequence beside a constant one, then back to nothing."""
    lengths = [*range(140), 511, 3, 0]
    problems = [build(Case((1, 1), (past, 20), seed=past, spare_columns=0, **SHAPE)) for past in lengths]
    for kernel in paths_for(call_of(problems[0]), stream.device):
        op, slots = prepared(problems[0], stream, kernel), Slots(problems[0], stream)
        slots.load(problems[0])
        with CapturedGraph(stream) as graph:
            slots.run(op)
        for problem in problems:
            slots.load(problem)
            slots.run(op)
            eager, _ = slots.read(problem)
            slots.load(problem)
            poison_workspace(op, stream)
            graph.replay()
            replayed, _ = slots.read(problem)
            assert_same(replayed, eager)
            assert_close("a sequence growing under one graph", kernel, replayed, reference(problem))


def test_two_graphs_on_two_streams(stream: Stream) -> None:
    problems = steps("bfloat16")
    pair = [problems[5], problems[9]]
    for kernel in paths_for(call_of(pair[0]), stream.device):
        streams = [Stream(stream.device), Stream(stream.device)]
        ops = [prepared(problem, s, kernel) for problem, s in zip(pair, streams, strict=True)]
        slots = [Slots(problem, s) for problem, s in zip(pair, streams, strict=True)]
        graphs = []
        for op, slot, problem, s in zip(ops, slots, pair, streams, strict=True):
            slot.load(problem)
            with CapturedGraph(s) as graph:
                slot.run(op)
            graphs.append(graph)
        for _ in range(20):
            for graph in graphs:
                graph.replay()
        for slot, problem, s in zip(slots, pair, streams, strict=True):
            s.synchronize()
            got, _ = slot.read(problem)
            assert_close("two graphs at once", kernel, got, reference(problem))


def test_a_graph_outlives_every_other_object(stream: Stream) -> None:
    problem = steps("bfloat16")[5]
    for kernel in paths_for(call_of(problem), stream.device):
        slots = Slots(problem, stream)
        slots.load(problem)
        with CapturedGraph(stream) as graph:
            slots.run(prepared(problem, stream, kernel))
        graph.replay()
        got, _ = slots.read(problem)
        assert_close("graph without its operator", kernel, got, reference(problem))


def test_a_cold_operator_inside_a_capture_is_refused(stream: Stream) -> None:
    problem = steps("bfloat16")[5]
    slots = Slots(problem, stream)
    op = PagedAttention(call_of(problem), BOUNDS, device=stream.device)
    with pytest.raises(NotPrepared), CapturedGraph(stream):
        slots.run(op)
    op.prepare()
    slots.load(problem)
    with CapturedGraph(stream) as graph:
        slots.run(op)
    graph.replay()
    got, _ = slots.read(problem)
    assert_close("after a refused capture", "auto", got, reference(problem))


def test_capture_owned_by_torch(stream: Stream) -> None:
    torch = pytest.importorskip("torch")
    problem = steps("bfloat16")[5]
    for kernel in paths_for(call_of(problem), stream.device):
        op, slots = prepared(problem, stream, kernel), Slots(problem, stream)
        slots.load(problem)
        torch_stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch_stream):
            op.run(
                **slots.arrays,
                plan=slots.plan,
                output=slots.output,
                lse=slots.lse,
                stream=torch.cuda.current_stream(),
            )
        del op
        slots.load(problem)
        graph.replay()
        torch.cuda.synchronize()
        got, _ = slots.read(problem)
        assert_close("capture owned by torch", kernel, got, reference(problem))


def test_capture_owned_by_the_raw_driver(stream: Stream) -> None:
    problem = steps("bfloat16")[6]
    driver = stream.device.driver
    for kernel in paths_for(call_of(problem), stream.device, debug=True):
        op = PagedAttention(
            call_of(problem), BOUNDS, device=stream.device, kernel=kernel, debug=True
        ).prepare()
        slots = Slots(problem, stream)
        slots.load(problem)
        with stream.device:
            driver.begin_capture(stream.handle)
            slots.run(op)
            executable = driver.instantiate(driver.end_capture(stream.handle))
        del op
        slots.load(problem)
        with stream.device:
            driver.launch_graph(executable, stream.handle)
        got, _ = slots.read(problem)
        assert_close("capture owned by the raw driver", kernel, got, reference(problem))
        with stream.device:
            driver.destroy_executable(executable)


def test_capture_owned_by_cuda_core(stream: Stream) -> None:
    from cuda.core import Device as CoreDevice

    problem = steps("float16")[6]
    for kernel in paths_for(call_of(problem), stream.device):
        op, slots = prepared(problem, stream, kernel), Slots(problem, stream)
        slots.load(problem)
        core = CoreDevice(0)
        core.set_current()
        core_stream = core.create_stream()
        builder = core_stream.create_graph_builder()
        builder.begin_building()
        op.run(**slots.arrays, plan=slots.plan, output=slots.output, lse=slots.lse, stream=builder.stream)
        graph = builder.end_building().complete()
        slots.load(problem)
        graph.launch(core_stream)
        core_stream.sync()
        got, _ = slots.read(problem)
        assert_close("capture owned by cuda.core", kernel, got, reference(problem))


class _Counting:
    """The real driver with every call counted."""

    def __init__(self, driver: Any) -> None:
        self.calls: Counter[str] = Counter()
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._driver, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return attribute(*arguments, **options)

        return counted


def free_bytes() -> int:
    from cuda.bindings import driver

    return int(driver.cuMemGetInfo()[1])


def test_run_allocates_nothing_and_waits_for_nothing(stream: Stream) -> None:
    problem = build(Case((4, 1, 3, 0, 2), (61, 200, 0, 9, 300), **SHAPE))
    counting: Any = _Counting(stream.device.driver)
    device = Device(counting, 0)
    arrays = upload(problem, stream)
    output = poisoned((10, 8 * 128), "bfloat16", stream)
    for kernel in paths_for(call_of(problem), stream.device):
        op = PagedAttention(call_of(problem), BOUNDS, device=device, kernel=kernel).prepare()
        op.run(**arrays, output=output, stream=stream)
        stream.synchronize()
        with device:
            before = free_bytes()
            counting.calls.clear()
            for _ in range(200):
                op.run(**arrays, output=output, stream=stream)
            after = free_bytes()
        allowed = {"enter_context", "pop_context", "is_capturing"}
        assert set(counting.calls) <= allowed, counting.calls
        assert before == after
        stream.synchronize()


def test_eager_host_time_is_recorded(stream: Stream, facts: dict[str, Any]) -> None:
    """A figure for the record; its limit is a target of the benchmarks, not of this test."""
    import time

    problem = build(Case((1,) * 4, (9,) * 4, **SHAPE))
    arrays = upload(problem, stream)
    output = poisoned((4, 8 * 128), "bfloat16", stream)
    for kernel in paths_for(call_of(problem), stream.device):
        op = PagedAttention(call_of(problem), BOUNDS, device=stream.device, kernel=kernel).prepare()
        samples = []
        for _ in range(20):
            stream.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                op.run(**arrays, output=output, stream=stream)
            samples.append((time.perf_counter() - start) / 20 * 1e6)
        facts[f"eager host us, {kernel}"] = round(float(np.median(samples)), 2)
    fresh = run_with(op, problem, stream)
    assert_close("after timing", kernel, fresh, reference(problem))


def test_struct_is_passed_whole(stream: Stream) -> None:
    """The launch copies the arguments: changing them afterwards does not reach a queued kernel."""
    problem = build(Case((1, 1), (30, 5), **SHAPE))
    for kernel in paths_for(call_of(problem), stream.device):
        op = PagedAttention(call_of(problem), BOUNDS, device=stream.device, kernel=kernel).prepare()
        arrays, outputs = (
            upload(problem, stream),
            [poisoned((2, 8 * 128), "bfloat16", stream) for _ in range(40)],
        )
        for output in outputs:
            op.run(**arrays, output=output, stream=stream)
        ctypes.memset(ctypes.addressof(op._params), 0, ctypes.sizeof(op._params))
        found = [output.to_numpy(stream) for output in outputs]
        for again in found[1:]:
            np.testing.assert_array_equal(bits(again), bits(found[0]))
        assert np.isfinite(found[0].astype(np.float32)).all()
