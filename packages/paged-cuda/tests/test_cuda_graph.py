import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from paged_cuda import CapturedGraph, Device, DeviceArray, GraphClosed, NotPrepared, Stream
from paged_cuda.testing import FakeDriver

Make = Callable[..., Any]


@pytest.fixture
def stream(device: Device) -> Stream:
    return Stream(device)


def test_replay_repeats_what_was_captured(
    driver: FakeDriver, stream: Stream, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op, operands = make_operator(call).prepare(), make_operands(call)
    with CapturedGraph(stream) as graph:
        op.run(**operands, stream=stream)
    assert driver.launched == []
    before = driver.calls.copy()
    for _ in range(3):
        graph.replay()
    assert driver.calls - before == {"push_context": 3, "launch_graph": 3, "pop_context": 3}
    assert len(driver.launched) == 6
    assert driver.launched[:2] == driver.launched[2:4]
    assert driver.graphs == {}


def test_operands_live_as_long_as_the_graph(
    driver: FakeDriver, stream: Stream, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op, operands = make_operator(call).prepare(), make_operands(call)
    pointers = {array.pointer for array in operands.values()}
    with CapturedGraph(stream) as graph:
        op.run(**operands, stream=stream)
    del operands, op
    gc.collect()
    assert pointers <= set(driver.memory)
    graph.close()
    gc.collect()
    assert not pointers & set(driver.memory)
    assert driver.executables == {}


def test_a_dropped_graph_is_destroyed(driver: FakeDriver, stream: Stream) -> None:
    with CapturedGraph(stream) as graph:
        pass
    gone = weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None
    assert driver.executables == {}


def test_cold_operator_under_capture_names_what_to_prepare_and_leaves_no_capture(
    driver: FakeDriver, stream: Stream, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    with pytest.raises(NotPrepared, match="baseline_latent_bf16"), CapturedGraph(stream) as graph:
        make_operator(call).run(**make_operands(call), stream=stream)
    assert driver.capturing == {}
    assert driver.graphs == {}
    with pytest.raises(GraphClosed):
        graph.replay()
    # The stream is usable again.
    op = make_operator(call).prepare()
    with CapturedGraph(stream):
        op.run(**make_operands(call), stream=stream)


def test_a_graph_captures_once_and_refuses_after_close(stream: Stream) -> None:
    with CapturedGraph(stream) as graph:
        pass
    with pytest.raises(GraphClosed), graph:
        pass
    graph.close()
    with pytest.raises(GraphClosed):
        graph.replay()


def test_two_graphs_on_two_streams(
    driver: FakeDriver, device: Device, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op = make_operator(call).prepare()
    streams, graphs = [Stream(device), Stream(device)], []
    for stream in streams:
        with CapturedGraph(stream) as graph:
            op.run(**make_operands(call), stream=stream)
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    assert [launch.stream for launch in driver.launched] == [s.handle for s in streams for _ in range(2)]


def test_an_array_freed_inside_a_capture_does_not_break_it(
    driver: FakeDriver, device: Device, stream: Stream
) -> None:
    with CapturedGraph(stream) as graph:
        array = DeviceArray.empty((4,), "int32", device)
        del array
        gc.collect()
    graph.replay()
    assert driver.calls["free"] == 1


def test_graph_errors_pickle() -> None:
    error = GraphClosed("graph", "CapturedGraph", "no captured work", "a finished capture")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, again.expected) == (GraphClosed, error.args, error.expected)
