"""Whatever fails, at whatever moment, nothing has changed.

A trace function raises MemoryError at the n-th line that the package runs, for every n, but not inside
functions whose name starts with ``apply_`` or ``_apply``: those only assign what was made before. After
each failure the state's digest is what it was before the call.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from paged_kv import CacheKey, IndexPlanBuffers, KVCacheManager, PageGeometry, PrefixChain

PACKAGE = "paged_kv"
KEY = CacheKey(model="m", dtype="float16", layout="LATENT")


class FaultError(MemoryError):
    pass


class LineFault:
    """Raises at the n-th line outside of what only assigns."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.fired = False
        self.place = ""

    def __call__(self, frame, event, arg):
        if PACKAGE not in frame.f_globals.get("__name__", "") or self._assigns(frame):
            return None
        return self.line

    @staticmethod
    def _assigns(frame) -> bool:
        while frame is not None:
            if frame.f_code.co_name.startswith(("apply_", "_apply")):
                return True
            frame = frame.f_back
        return False

    def line(self, frame, event, arg):
        if event == "line" and not self.fired:
            self.left -= 1
            if self.left < 0:
                self.fired = True
                self.place = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise FaultError(self.place)
        return self.line


def chain_of(tokens) -> PrefixChain:
    chain = PrefixChain(KEY, 16)
    chain.extend(tokens)
    return chain


class Scene:
    """A bit of everything: shared tails, cached pages, a promise, a step in flight, a row on the host."""

    def __init__(self) -> None:
        self.kv = kv = KVCacheManager(
            PageGeometry(34, 16), max_sequences=10, initial_blocks=30, host_blocks=6, watermark=1
        )
        kv.set_quota("acme", 20)
        self.row, self.away, self.other = (kv.create(1, tenant=t)[0] for t in ("acme", None, "acme"))
        self.windowed = kv.create(1, window=16)[0]
        self.fresh = kv.create(1)[0]
        self.run([self.row, self.away, self.other, self.windowed], [40, 20, 36, 70])
        self.chain = chain_of(range(40))
        kv.register(self.row, self.chain)
        self.beam = kv.fork(self.row)[0]
        kv.confirm_swap(kv.swap_out(self.away))
        self.promised = kv.admit(33, tenant="acme")[0]
        with kv.begin_step([self.other], 3) as step:
            step.commit()
        self.epoch = step.epoch
        kv.truncate(self.other, 20)
        self.hit = kv.lookup_and_pin(self.chain)
        self.pins = kv.pin(self.other)
        self.plan_out = kv.swap_out(kv.create(1))
        self.buffers = IndexPlanBuffers(8, 128, 8)

    def run(self, rows, lengths) -> None:
        with self.kv.begin_step(rows, lengths) as step:
            step.commit()
        self.kv.complete(step.epoch)


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "create": lambda s: s.kv.create(2, tenant="new"),
    "admit": lambda s: s.kv.admit([17, 60], tenant="acme", hits=[None, s.hit]),
    "release": lambda s: s.kv.release([s.row, s.promised, s.away]),
    "preempt": lambda s: s.kv.preempt([s.beam]),
    "truncate": lambda s: s.kv.truncate([s.row, s.beam], [33, 5]),
    "fork": lambda s: s.kv.fork(s.row, 2, at=37),
    "advance_window": lambda s: s.kv.advance_window(s.windowed),
    "begin_step": lambda s: s.kv.begin_step([s.row, s.beam, s.promised, s.fresh], [9, 1, 33, 20]),
    "complete": lambda s: s.kv.complete(s.epoch),
    "lookup_and_pin": lambda s: s.kv.lookup_and_pin(s.chain),
    "attach": lambda s: s.kv.attach(s.fresh, s.hit),
    "drop": lambda s: s.hit.drop(),
    "pin": lambda s: s.kv.pin(s.row),
    "register": lambda s: s.kv.register(s.beam, s.chain),
    "reset": lambda s: s.kv.reset_prefix_cache(),
    "swap_out": lambda s: s.kv.swap_out(s.windowed),
    "swap_in": lambda s: s.kv.swap_in(s.away),
    "confirm_swap": lambda s: s.kv.confirm_swap(s.plan_out),
    "cancel_swap": lambda s: s.kv.cancel_swap(s.plan_out),
    "quarantine": lambda s: s.kv.quarantine(29),
    "grow_pool": lambda s: s.kv.grow_pool(33),
    "shrink_pool": lambda s: s.kv.shrink_pool(28),
    "set_quota": lambda s: s.kv.set_quota("acme", 3),
    "stats": lambda s: s.kv.stats(),
    "common_prefix": lambda s: s.kv.common_prefix_blocks([s.row, s.beam]),
}


def faults(prepare: Callable[[], tuple[KVCacheManager, Callable[[], object]]]) -> Iterator[int]:
    """Fail the operation at every line in turn, checking the digest; ends when it runs through."""
    for at in range(2_000):
        kv, operation = prepare()
        before = kv.digest()
        fault = LineFault(at)
        before_trace = sys.gettrace()  # coverage, perhaps
        sys.settrace(fault)
        with contextlib.suppress(FaultError):
            operation()
        sys.settrace(before_trace)
        if fault.fired:
            assert kv.digest() == before, f"changed by a failure at {fault.place}"
            kv.check("full")
        if not fault.fired:
            return
        yield at
    raise AssertionError("never ran through")


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failure_at_any_line_changes_nothing(name: str) -> None:
    def prepare():
        scene = Scene()
        return scene.kv, lambda: OPERATIONS[name](scene)

    assert sum(1 for _ in faults(prepare)) > 3


STEP_OPERATIONS: dict[str, Callable] = {
    "commit": lambda scene, step: step.commit(),
    "commit_prefix": lambda scene, step: step.commit_prefix([3, 0, 17, 1]),
    "rollback": lambda scene, step: step.rollback(),
    "plan": lambda scene, step: step.plan(),
}


@pytest.mark.parametrize("emitted", [False, True])
@pytest.mark.parametrize("name", STEP_OPERATIONS)
def test_a_failure_while_a_step_ends_leaves_it_open(name: str, emitted: bool) -> None:
    def prepare():
        scene = Scene()
        step = scene.kv.begin_step([scene.row, scene.beam, scene.promised, scene.fresh], [9, 1, 33, 20])
        if emitted:
            step.plan()
        return scene.kv, lambda: STEP_OPERATIONS[name](scene, step)

    assert sum(1 for _ in faults(prepare)) > 3


def test_a_plan_that_fails_halfway_is_made_whole_by_the_next() -> None:
    rows_at = [5, 33, 60, 2]
    for at in range(200):
        kv = KVCacheManager(PageGeometry(60, 16), max_sequences=8)
        rows = kv.create(4)
        buffers = IndexPlanBuffers(4, 128, 8)
        with kv.begin_step(rows[:3], rows_at[:3]) as step:
            step.plan(buffers)
            step.commit()
        fault = LineFault(at)
        with kv.begin_step(rows[::-1], [1, 17, 2, 40]) as step:
            fresh = step.plan()
            before_trace = sys.gettrace()
            sys.settrace(fault)
            with contextlib.suppress(FaultError):
                step.plan(buffers)
            sys.settrace(before_trace)
            plan = step.plan(buffers)
            width = fresh.block_table.shape[1]
            assert np.array_equal(plan.block_table[:, :width], fresh.block_table)
            assert (buffers.block_table[:, width:] == -1).all()
            assert np.array_equal(plan.slot_mapping, fresh.slot_mapping)
            step.rollback()
        if not fault.fired:
            return
    raise AssertionError("never ran through")


def test_a_sink_that_raises_is_noted_and_undoes_nothing() -> None:
    kv = KVCacheManager(PageGeometry(4, 16), max_sequences=2)

    def broken(event) -> None:
        raise RuntimeError("observer is down")

    heard = []
    kv.add_event_sink(broken)
    kv.add_event_sink(heard.append)
    row = kv.create(1)
    with kv.begin_step(row, 32) as step:
        step.commit()
    assert kv.register(row[0], chain_of(range(32))) == 2
    assert [event.number for event in heard] == [1, 2]
    assert [str(error) for error in kv.sink_errors] == ["observer is down"] * 2
    assert kv.stats().sink_errors_total == 2
    kv.check("full")
