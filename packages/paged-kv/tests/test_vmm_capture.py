"""Captures and memory calls exclude each other, nobody waits for itself, and what was deferred happens."""

import threading

import pytest
from paged_kv.errors import CaptureInProgress, GraphOutOfOrder
from paged_kv.vmm import (
    PROCESS_GATE,
    BindingSignature,
    CaptureGate,
    GraphAction,
    GraphKeepDecision,
    GraphLifecycle,
    GraphSignature,
)


class Worker:
    """A thread that enters a block and stays until told to go."""

    def __init__(self, enter) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, args=(enter,))
        self.thread.start()

    def run(self, enter) -> None:
        with enter():
            self.inside.set()
            self.leave.wait()

    def end(self) -> None:
        self.leave.set()
        self.thread.join()


def settle(condition) -> None:
    """Wait until another thread got so far."""
    event = threading.Event()
    for _ in range(2_000):
        if condition():
            return
        event.wait(0.001)
    raise AssertionError("it never came to it")


def test_memory_calls_share_and_a_capture_waits_for_them() -> None:
    gate = CaptureGate()
    first, second = Worker(gate.memory), Worker(gate.memory)
    assert first.inside.wait(2)
    assert second.inside.wait(2)
    assert gate.memory_calls == 2
    capture = Worker(gate.capture)
    settle(lambda: gate._wanted == 1)
    assert gate.depth == 0
    late = Worker(gate.memory)
    first.end()
    assert not capture.inside.wait(0.02)
    second.end()
    assert capture.inside.wait(2)
    assert not late.inside.is_set(), "captures go first"
    assert gate.depth == 1
    capture.end()
    assert late.inside.wait(2)
    late.end()
    assert (gate.depth, gate.memory_calls) == (0, 0)


def test_the_capturing_thread_is_refused() -> None:
    gate = CaptureGate()
    with gate.capture(), gate.capture():
        for enter in (gate.memory, lambda: _call(gate.require_not_capturing)):
            with pytest.raises(CaptureInProgress) as caught, enter():
                pass
            assert caught.value.numbers == {"thread": threading.get_ident(), "depth": 2}
    gate.require_not_capturing()


def _call(function):
    function()
    return CaptureGate().memory()


def test_a_memory_call_does_not_begin_a_capture() -> None:
    gate = CaptureGate()
    with gate.memory(), gate.memory():
        with pytest.raises(CaptureInProgress), gate.capture():
            pass
        assert gate.memory_calls == 1
    with gate.capture():
        assert gate.depth == 1


def test_a_nested_memory_call_passes_a_waiting_capture() -> None:
    gate = CaptureGate()
    with gate.memory():
        capture = Worker(gate.capture)
        settle(lambda: gate._wanted == 1)
        with gate.memory():
            assert not capture.inside.is_set()
    assert capture.inside.wait(2)
    capture.end()


def test_deferred_callbacks_run_after_the_outermost_capture() -> None:
    gate = CaptureGate()
    ran: list[str] = []
    gate.defer(lambda: ran.append("now"))
    with gate.capture():
        with gate.capture():
            gate.defer(lambda: ran.append("first"))
        gate.defer(lambda: 1 / 0)

        def second() -> None:
            with gate.memory():
                ran.append("second")

        gate.defer(second)
        assert ran == ["now"]
    assert ran == ["now", "first", "second"]
    assert [type(error) for error in gate.deferred_errors] == [ZeroDivisionError]
    with pytest.raises(ZeroDivisionError):
        gate.defer(lambda: 1 / 0)


def test_a_callback_that_captures_leaves_the_rest_to_its_own_end() -> None:
    gate = CaptureGate()
    ran: list[str] = []

    def captures() -> None:
        with gate.capture():
            ran.append("captured")

    with gate.capture():
        gate.defer(captures)
        gate.defer(lambda: ran.append("rest"))
    assert ran == ["captured", "rest"]


def test_a_capture_that_fails_is_over() -> None:
    gate = CaptureGate()
    with pytest.raises(KeyError), gate.capture():
        raise KeyError
    assert gate.depth == 0
    with gate.memory():
        pass
    assert isinstance(PROCESS_GATE, CaptureGate)


def binding(**changes) -> BindingSignature:
    fields = {"address": 4096, "shape": (1, 64, 2, 64), "fixed_row": True, "mask_committed": True}
    return BindingSignature(**{**fields, **changes})


def test_an_equal_signature_keeps_the_graph() -> None:
    before = GraphSignature((binding(), binding(address=8192)), (1, 2))
    after = GraphSignature((binding(), binding(address=8192)), (1, 2))
    decision = GraphKeepDecision.between(before, after)
    assert decision.keep
    assert "unchanged" in decision.reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"address": 1}, "address"),
        ({"shape": (1, 128, 2, 64)}, "shape"),
        ({"fixed_row": False}, "row 0"),
        ({"fixed_row": None}, "row 0"),
        ({"mask_committed": False}, "mask"),
        ({"mask_committed": None}, "mask"),
    ],
)
def test_each_of_the_four_dependencies_is_enough_to_give_it_up(change, word: str) -> None:
    before = GraphSignature((binding(), binding()))
    after = GraphSignature((binding(), binding(**change)))
    decision = GraphKeepDecision.between(before, after)
    assert not decision.keep
    assert decision.reason.startswith("binding 1")
    assert word in decision.reason
    if set(change) <= {"fixed_row", "mask_committed"}:
        assert not GraphKeepDecision.between(after, after).keep, "equal, and still not to be trusted"
        assert not GraphKeepDecision.between(after, before).keep


def test_what_is_unknown_gives_it_up() -> None:
    known = GraphSignature((binding(),), (1,))
    for before, after in (
        (None, known),
        (known, None),
        (known, GraphSignature((), (1,))),
        (known, GraphSignature((binding(),), (2,))),
    ):
        assert not GraphKeepDecision.between(before, after).keep


def test_a_graph_is_warmed_captured_and_replayed() -> None:
    graph = GraphLifecycle()
    actions = []
    for _ in range(4):
        with graph.step() as action:
            actions.append(action)
    graph.invalidate()
    with graph.step() as action:
        actions.append(action)
    assert actions == [*("warm", "capture", "replay", "replay"), "warm"]
    assert (graph.captures, graph.replays) == (1, 2)
    eager = GraphLifecycle(enabled=False)
    with eager.step() as action:
        assert action is GraphAction.EAGER
    assert (eager.captures, eager.action) == (0, GraphAction.EAGER)


def test_a_step_that_fails_is_done_again() -> None:
    graph = GraphLifecycle()
    for expected in ("warm", "capture", "replay"):
        with pytest.raises(KeyError), graph.step() as action:
            raise KeyError
        assert action == expected
        with graph.step() as action:
            assert action == expected
    assert (graph.captures, graph.replays) == (1, 1)


def test_steps_do_not_nest_and_nothing_is_given_up_inside_one() -> None:
    graph = GraphLifecycle()
    with graph.step():
        with pytest.raises(GraphOutOfOrder), graph.step():
            pass
        with pytest.raises(GraphOutOfOrder) as caught:
            graph.invalidate()
        assert caught.value.numbers == {"action": "warm"}
    assert graph.action is GraphAction.CAPTURE
