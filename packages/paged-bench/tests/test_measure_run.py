"""`paged-bench run` over a simulated GPU: what is kept and refused, and that nothing wrong is ever timed."""

import ctypes
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paged_bench.cli import main
from paged_bench.compare.comparison import compare
from paged_bench.compare.verdict import Verdict
from paged_bench.errors import MeasurementError, OptionError
from paged_bench.measure.command import run
from paged_bench.measure.nvml import GpuState
from paged_bench.measure.options import MeasureOptions
from paged_bench.measure.peers import PeerCalls, Unsuitable
from paged_bench.measure.step import operator_of, run_step
from paged_bench.measure.suite import CaseSpec
from paged_bench.measure.testing import IDLE, SimulatedGpu, attend, simulated_machine
from paged_bench.record import Record, load
from paged_cuda import CubinCache, DriverError, NoDriver
from paged_cuda.params import AttentionParams
from rich.console import Console

DECODE = CaseSpec("decode", (40, 40), (1, 1), 4, 192, 128, 16)
MIXED = CaseSpec("mixed", (40, 33, 70), (1, 17, 1), 4, 192, 128, 16)
STACK = CaseSpec("model", (40, 40), (1, 1), 4, 192, 128, 16, layers=3)


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> CubinCache:
    return CubinCache(tmp_path_factory.mktemp("cubins"))


class Runs:
    """Runs the command on a simulated GPU and keeps what it printed."""

    def __init__(self, out: Path, cubins: CubinCache) -> None:
        self.out = out
        self.cubins = cubins
        self.gpu = SimulatedGpu(limit=24 << 20)
        self.text = ""

    def __call__(
        self,
        *specs: CaseSpec,
        look: Callable[[str], GpuState] = lambda uuid: IDLE,
        peers: Any = (),
        peers_named: str = "auto",
        **options: Any,
    ) -> int:
        given = MeasureOptions(
            **{
                **{"suite": "quick", "only": (), "peers": peers_named, "out": self.out, "kernel": "baseline"},
                **{"rounds": 1, "delay": 0.0, "force": False, "device": 0, "command": "paged-bench run"},
                **options,
            }
        )
        screen = io.StringIO()
        try:
            return run(
                given,
                simulated_machine(self.gpu, look),
                specs=specs or (DECODE,),
                peers=peers,
                cache=self.cubins,
                console=Console(file=screen, width=200),
            )
        finally:
            self.text = screen.getvalue()

    @property
    def record(self) -> Record:
        return load(self.out)


@pytest.fixture
def runs(tmp_path: Path, cubins: CubinCache) -> Runs:
    return Runs(tmp_path / "record.json", cubins)


def test_a_run_keeps_everything(runs):
    assert runs(DECODE, MIXED, STACK, rounds=2) == 0
    record = runs.record
    assert record.stopped is None
    assert record.suite.name == "quick"
    assert record.environment.gpu.name == "fake GPU"
    assert record.environment.gpu.sm_clock_mhz == (1980.0, 1980.0)
    assert {one.what for one in record.ceilings} == {"read", "copy", "matmul", "launch"}
    assert record.ceiling("read") == pytest.approx(4e12, rel=0.01)
    assert record.ceiling("matmul", "bfloat16") == pytest.approx(7e14, rel=0.01)
    assert [case.id for case in record.cases] == ["selfcheck/read", DECODE.id, MIXED.id, STACK.id]
    case = record.case(DECODE.id)
    assert {(one.what, one.timing) for one in case.series} == {
        *((name, "graph") for name in ("attend+combine", "step", "append", "layer")),
        *(("attend+combine", "eager"), ("step", "eager"), ("step", "wall")),
    }
    assert case.samples().median == pytest.approx(40, rel=0.02)
    assert case.samples("step", "graph").median == pytest.approx(42, rel=0.02)
    assert case.samples("append").median == pytest.approx(2, rel=0.02)
    assert len(case.samples().blocks) == 2
    assert case.correctness.relative_error < 5e-3
    assert case.memory.run_allocations == 0
    assert case.memory.cache_bytes > 0
    assert case.parameters["path"] == "baseline"
    assert case.variants[-1].registers > 0
    assert case.variants[-1].spill_bytes == 0
    assert record.ratio_to_floor(case) > 1
    stack = record.case(STACK.id)
    assert stack.samples("step").median == pytest.approx(3 * 42, rel=0.02)
    assert stack.correctness.reference.endswith("each of 3 layers")
    assert "4 of" not in runs.text
    assert "3 of 3 cases measured" in runs.text


def test_a_path_with_a_schedule_has_it_timed_alone(runs):
    assert runs(DECODE, kernel="sm80") == 0
    case = runs.record.case(DECODE.id)
    medians = {one.what: one.median for one in case.series if one.timing == "graph"}
    assert medians == pytest.approx(
        {
            **{"attend+combine": 42, "step": 47, "append": 2, "schedule": 3, "layer": 44},
            "append+schedule": 5,
        },
        rel=0.02,
    )
    assert case.parameters["path"] == "sm80"
    (attend,) = (one for one in case.variants if one.description)
    assert attend.description.startswith("sm80: asked for by name")
    assert attend.kernel.startswith("sm80_latent")


def test_a_case_that_multiplies_much_is_timed_under_a_load_too(runs, monkeypatch):
    narrow = replace(DECODE, head_size=64, v_head_size=64, rotary_dim=0, heads=64)
    monkeypatch.setattr("paged_bench.measure.testing.PRODUCT_RATE", 7e13)  # more than 8 operations a byte
    assert runs(narrow, DECODE) == 0
    loaded = runs.record.case(narrow.id).samples("attend+combine, sustained")
    assert loaded.median == pytest.approx(40, rel=0.02)
    assert loaded.warmups > 1000
    assert runs.record.case(DECODE.id).samples("attend+combine, sustained") is None


def test_what_one_case_writes_does_not_change_another_one(runs):
    assert runs(MIXED, DECODE, replace(MIXED, heads=5), rounds=3) == 0
    assert all(len(case.samples("step", "graph").blocks) == 3 for case in runs.record.cases if case.shape)


def spoilt(output: np.ndarray) -> None:
    output[-1, -1] += 1


def unwritten(output: np.ndarray) -> None:
    output.view(np.uint16)[0] = 0xFFFF


@pytest.mark.parametrize(("spoil", "reason"), [(spoilt, "relative error"), (unwritten, "not finite")])
@pytest.mark.parametrize("spec", [DECODE, STACK])
def test_a_wrong_output_is_never_timed(runs, spec, spoil, reason):
    runs.gpu.spoil = spoil
    assert runs(spec) == 1
    case = runs.record.case(spec.id)
    assert reason in case.failed
    assert case.series == ()
    assert runs.record.stopped is None
    # Nothing of the case was put into a graph; the ceilings were before it.
    assert not [one for graph in runs.gpu.executables.values() for one in graph if "baseline" in one.symbol]


def test_a_wrong_cache_row_is_never_timed(runs, monkeypatch):
    def with_a_wrong_bit(params: AttentionParams, spoil: Any) -> None:
        attend(params, spoil)
        slot = ctypes.c_int32.from_address(params.slot_mapping).value
        # Too little to show in the output.
        ctypes.c_uint16.from_address(params.key_cache + 2 * slot * params.head_size).value ^= 1

    monkeypatch.setattr("paged_bench.measure.testing.attend", with_a_wrong_bit)
    assert runs(DECODE) == 1
    assert "is not the one that the oracle writes" in runs.record.case(DECODE.id).failed


def test_an_output_that_changes_while_it_is_timed_takes_the_figures_away(runs):
    count = iter(range(10**9))

    def late(output: np.ndarray) -> None:
        if next(count) > 8:
            output[0, 0] += 0.5

    runs.gpu.spoil = late
    assert runs(DECODE) == 1
    assert "other bits" in runs.record.case(DECODE.id).failed


@pytest.mark.parametrize("kernel", ["baseline", "sm80"])
def test_attention_that_is_wrong_only_by_itself_takes_the_figures_away(runs, kernel):
    """Its graph is what the main figure times, and no append runs in it."""
    symbols = [""]

    def look(symbol: str) -> None:
        if symbol.startswith(("append", "baseline", "sm80")):
            symbols.append(symbol)

    def spoil(output: np.ndarray) -> None:
        if not symbols[-2].startswith("append"):
            output[0, 0] += 0.5

    runs.gpu.before_launch, runs.gpu.spoil = look, spoil
    assert runs(DECODE, kernel=kernel) == 1
    assert "attention alone" in runs.record.case(DECODE.id).failed
    assert runs.record.case(DECODE.id).series == ()


def test_an_interrupt_keeps_what_was_measured(runs):
    launches = iter(range(10**9))

    def interrupt(symbol: str) -> None:
        if symbol.startswith("baseline") and next(launches) == 6000:
            raise KeyboardInterrupt

    runs.gpu.before_launch = interrupt
    assert runs(DECODE, MIXED, replace(MIXED, heads=5), replace(MIXED, heads=6)) == 2
    record = runs.record
    assert record.stopped == "interrupted"
    assert record.case(DECODE.id).samples().median == pytest.approx(40, rel=0.02)
    assert 2 <= len(record.cases) < 5
    assert "stopped in round 1 of 1: interrupted" in runs.text


def test_an_interrupt_before_the_first_measurement_is_status_2_too(runs):
    def interrupt(uuid: str) -> GpuState:
        raise KeyboardInterrupt

    assert runs(DECODE, look=interrupt) == 2
    assert "before anything was measured" in runs.text
    assert not runs.out.exists()


def test_until_the_end_the_record_says_that_it_is_not_complete(runs):
    seen = []

    def look(symbol: str) -> None:
        if runs.out.exists():
            seen.append(load(runs.out).stopped)

    def once(symbol: str) -> None:
        runs.gpu.before_launch = None
        look(symbol)

    runs.gpu.before_launch = once
    assert runs(DECODE) == 0
    assert seen == ["still running"]


def test_a_failing_driver_keeps_what_was_measured(runs):
    launches = iter(range(10**9))

    def fail(symbol: str) -> None:
        if symbol.startswith("baseline") and next(launches) == 6000:
            raise DriverError("driver-call", "cuLaunchKernelEx", "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_SUCCESS")

    runs.gpu.before_launch = fail
    assert runs(DECODE, MIXED, replace(MIXED, heads=5), replace(MIXED, heads=6)) == 2
    record = runs.record
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in record.stopped
    assert record.case(DECODE.id).series
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in record.cases[-1].failed


def test_a_case_that_does_not_fit_is_a_row_and_the_others_run(runs):
    large = CaseSpec("decode", (4000,) * 20, (1,) * 20, 4, 192, 128, 16)
    assert runs(large, DECODE) == 2
    assert "MiB of device memory" in runs.record.case(large.id).failed
    assert runs.record.case(DECODE.id).series


@pytest.mark.parametrize("limit", [1000, 1 << 20, 15 << 20])
def test_ceilings_that_would_be_those_of_the_l2_are_not_measured(runs, limit):
    runs.gpu = SimulatedGpu(limit=limit)
    assert runs(DECODE) == 2
    assert "does not pass its L2" in runs.record.stopped
    assert runs.record.ceilings == ()


def test_out_of_memory_in_the_middle_is_a_row_too(runs):
    runs.gpu.failing = {}
    original = runs.gpu.allocate

    def allocate(nbytes: int) -> int:
        if nbytes == 2 * 2 * 5 * 192:  # the queries of the case with five heads
            raise DriverError("driver-call", "cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_SUCCESS")
        return original(nbytes)

    runs.gpu.allocate = allocate
    assert runs(replace(DECODE, heads=5), DECODE) == 2
    assert "out of device memory" in runs.record.case(replace(DECODE, heads=5).id).failed
    assert runs.record.case(DECODE.id).series


def test_a_kernel_that_refuses_a_case_is_a_row(runs):
    wide = replace(DECODE, head_size=768, v_head_size=512)
    assert runs(wide, kernel="sm80") == 2
    assert "sm80" in runs.record.case(wide.id).failed


def test_an_older_gpu_multiplies_by_mma_sync(tmp_path, cubins):
    runs = Runs(tmp_path / "record.json", cubins)
    runs.gpu = SimulatedGpu(limit=24 << 20, capability=(8, 0))
    assert runs(DECODE) == 0
    (matmul,) = (one for one in runs.record.ceilings if one.what == "matmul")
    assert "mma.sync" in matmul.method
    assert matmul.value == pytest.approx(7e14, rel=0.01)


def test_without_a_gpu_the_command_line_says_so(tmp_path, capsys, monkeypatch):
    def missing(name: str) -> Any:
        raise NoDriver("driver", "libcuda", "no such library", "an NVIDIA driver")

    monkeypatch.setattr("paged_bench.measure.machine.require_driver", lambda: missing("cuda"))
    assert main(["run", "--suite", "quick", "--peers", "none", "--out", str(tmp_path / "record.json")]) == 2
    assert "libcuda" in capsys.readouterr().err
    assert not (tmp_path / "record.json").exists()


def test_no_gpu_says_so():
    def nothing() -> Any:
        raise NoDriver("driver", "libcuda", "no such library", "an NVIDIA driver")

    machine = replace(simulated_machine(SimulatedGpu()), driver=nothing)
    options = MeasureOptions("quick", (), "none", Path("x"), "auto", 1, 0.0, False, 0, "paged-bench run")
    with pytest.raises(NoDriver):
        run(options, machine, specs=(DECODE,))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (replace(IDLE, processes=frozenset({4711})), "1 other process"),
        (replace(IDLE, utilization=80), "is busy: 80 %"),
        (replace(IDLE, mig=True), "MIG"),
    ],
)
def test_a_gpu_that_is_not_free_is_refused_unless_forced(runs, state, problem):
    with pytest.raises(MeasurementError, match=problem):
        runs(DECODE, look=lambda uuid: state)
    assert not runs.out.exists()
    assert runs.gpu.calls["allocate"] == 0
    assert runs(DECODE, look=lambda uuid: state, force=True) == 0
    assert problem in runs.text


def test_what_the_management_library_does_not_say_is_not_counted(runs):
    assert runs(DECODE, look=lambda uuid: GpuState()) == 0
    assert runs.record.environment.gpu.other_processes is None
    assert "could not be asked" in runs.text
    assert runs(DECODE) == 0
    assert "could not be asked" not in runs.text
    assert runs.record.environment.gpu.other_processes == 0


def test_somebody_who_comes_in_the_middle_stops_the_run(runs):
    looks = iter(range(10**9))

    def look(uuid: str) -> GpuState:
        number = next(looks)  # three before, one with ours, then one before each case
        ours = frozenset({1}) if number >= 3 else frozenset()
        return replace(IDLE, processes=ours | {4711} if number > 4 else ours)

    assert runs(DECODE, MIXED, look=look) == 2
    assert "began to compute" in runs.record.stopped
    assert runs.record.case(DECODE.id).series
    assert runs.record.case(MIXED.id) is None


def test_an_unwritable_record_is_refused_before_anything_is_measured(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        runs(DECODE, out=tmp_path / "file" / "record.json")
    assert runs.gpu.calls["allocate"] == 0


def test_a_pattern_that_matches_nothing_and_a_gpu_that_is_not_there(runs):
    with pytest.raises(OptionError, match="prefill"):
        runs(DECODE, only=("prefill",))
    with pytest.raises(OptionError, match="--device"):
        runs(DECODE, device=3)
    assert runs(DECODE, MIXED, only=("mixed/b3",)) == 0
    assert runs.record.suite.name == "quick (selected)"
    assert runs.record.case(DECODE.id) is None


def test_a_clock_that_is_off_is_said_and_is_no_success(runs):
    runs.gpu.memory_rate = 4e12

    def slower_later(symbol: str) -> None:
        if symbol == "spin":  # the last of the ceilings
            runs.gpu.memory_rate = 3.8e12

    runs.gpu.before_launch = slower_later
    assert runs(DECODE) == 2
    assert "95.0% of the read ceiling" in runs.text
    assert runs.record.case(DECODE.id).series


def test_an_added_delay_shows_in_the_main_series(runs):
    assert runs(DECODE, delay=0.2) == 0
    assert runs.record.case(DECODE.id).samples().median == pytest.approx(48, rel=0.02)


@pytest.mark.parametrize(("delay", "verdict"), [(0.0, Verdict.SAME), (0.05, None), (0.2, Verdict.SLOWER)])
def test_a_comparison_flags_a_delay_of_20_per_cent_and_not_of_5(runs, delay, verdict):
    runs.gpu.noise = 0.02
    assert runs(DECODE, rounds=2) == 0
    base = runs.record
    assert runs(DECODE, rounds=2, delay=delay) == 0
    rows = compare(base, runs.record).rows
    found = {row.what: row.verdict for row in rows if row.timing == "graph" and row.case_id == DECODE.id}
    for what in ("attend+combine", "step"):
        if verdict is None:
            assert found[what] not in (Verdict.SLOWER, Verdict.MUCH_SLOWER)
        else:
            assert found[what] is verdict
    assert found["layer"] is Verdict.SAME


class Copycat:
    """A peer that runs the operator once, or writes nothing, or fails; its timed calls are idle."""

    name = "copycat"
    title = "Copycat"
    modules = ("numpy",)
    distribution = "numpy"

    def __init__(self, error: Exception | None = None, cubins: CubinCache | None = None) -> None:
        self._error = error
        self._cubins = cubins

    def prepare(self, bench, spec, sets):
        if self._error is not None:
            raise self._error
        if self._cubins is not None:
            operator = operator_of(spec, bench.device, kernel="baseline", cache=self._cubins).prepare()
            run_step(operator, sets[0], bench.stream.handle)
        return PeerCalls([bench.kernels("bfloat16").spin(1980 * 30)] * len(sets), sets[0].output, None)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Unsuitable("pages are 64 tokens"), "pages are 64 tokens"),
        (RuntimeError("no kernel\nimage"), "RuntimeError: no kernel image"),
    ],
)
def test_a_peer_that_fails_is_a_row_that_says_why(runs, error, told):
    assert runs(DECODE, peers=(Copycat(error),)) == 0
    (row,) = runs.record.case(DECODE.id).peers
    assert (row.peer, row.failed) == ("Copycat", told)


def test_a_peer_that_writes_nothing_is_not_judged_by_what_the_operator_left(runs):
    assert runs(replace(DECODE, rotary_dim=0), peers=(Copycat(),)) == 0
    (row,) = runs.record.cases[-1].peers
    assert "not finite" in row.failed
    assert row.series == ()


def test_a_right_peer_is_timed_and_a_wrong_one_is_not(runs):
    unrotated = replace(DECODE, rotary_dim=0)
    assert runs(unrotated, DECODE, peers=(Copycat(cubins=runs.cubins),), rounds=2) == 0
    (right,), (wrong,) = (runs.record.case(spec.id).peers for spec in (unrotated, DECODE))
    assert right.series[0].median == pytest.approx(31, rel=0.02)
    assert right.correctness.relative_error < 5e-3
    # Peers get queries that are rotated already, so what the operator makes of them is not the answer.
    assert "wrong output" in wrong.failed
    assert wrong.series == ()


@pytest.mark.parametrize(("named", "told"), [("copycat", None), ("auto", None), ("none", "not asked for")])
def test_the_record_says_who_was_asked_for(runs, monkeypatch, named, told):
    for place in ("peers", "command"):  # as for the real ones, each call makes new objects
        monkeypatch.setattr(f"paged_bench.measure.{place}.all_peers", lambda: (Copycat(),))
    assert runs(DECODE, peers=None, peers_named=named) == 0
    (block,) = runs.record.peers
    assert (block.name, block.failed) == ("Copycat", told)


def test_an_unknown_path_is_refused_before_anything_is_measured(runs):
    with pytest.raises(OptionError, match="--kernel: there is no path 'sm70'; known are auto, sm90"):
        runs(DECODE, kernel="sm70")
    assert not runs.out.exists()


def test_unknown_and_absent_peers_are_refused(runs):
    with pytest.raises(OptionError, match="there is no peer 'flashattention'"):
        runs(DECODE, peers=None, peers_named="flashattention")
    with pytest.raises(OptionError, match="flashmla needs"):
        runs(DECODE, peers=None, peers_named="flashmla")
    assert not runs.out.exists()
