"""The residency report by whole runs: its counters come out of decodes, in host memory and by the CUDA code.

The CUDA run has everything real but the GPU: a driver in host memory stands in for it, and its kernel is the
NumPy attention over the addresses and strides that the launch was given.
"""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from paged_bench.cli import main
from paged_bench.demo.config import read_config
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.llama import Llama
from paged_bench.demo.rope import read_tables
from paged_bench.demo.weights import read_weights
from paged_bench.errors import BackendError, OptionError, PromptError
from paged_bench.residency import command
from paged_bench.residency.attention import attend
from paged_bench.residency.command import measure, select
from paged_bench.residency.crossing import crossing
from paged_bench.residency.cuda_machine import CudaMachine
from paged_bench.residency.decode import decode
from paged_bench.residency.figure import figure
from paged_bench.residency.kernel import SYMBOL, Params
from paged_bench.residency.machine import FakeMachine
from paged_bench.residency.options import ResidencyOptions
from paged_bench.residency.results import (
    CrossingResult,
    FloorResult,
    LaneResult,
    PlacementResult,
    Report,
    StepResult,
)
from paged_bench.residency.shapes import SHAPES, Variant, variants
from paged_bench.residency.text import growth_table, render
from paged_cuda import Device
from paged_cuda.testing import FakeDriver

G = 2 << 20
ROOT = Path(__file__).parents[3]
GOLDEN, DOCS = ROOT / "tests-golden" / "smollm2_greedy.json", ROOT / "docs"
SMALL, LARGE = SHAPES["0.5b"], SHAPES["14b"]
# capture, in place, head-major: captures, replays, invalidations, keeps.
COUNTERS = {
    (True, True, True): (4, 39, 4, 0),
    (True, True, False): (1, 45, 1, 3),
    (True, False, True): (4, 39, 4, 0),
    (True, False, False): (4, 39, 4, 0),
    (False, True, True): (0, 0, 4, 0),
    (False, True, False): (0, 0, 1, 3),
    (False, False, True): (0, 0, 4, 0),
    (False, False, False): (0, 0, 4, 0),
}


@pytest.fixture(scope="module")
def model_path(tiny_model, tmp_path_factory):
    """More layers than the small shape has, and more key-value heads."""
    model = tiny_model(layers=26, width=96, hidden=32, heads=6, kv_heads=3, head_size=16)
    return model.write(tmp_path_factory.mktemp("residency") / "tiny.gguf")


@pytest.fixture
def options(model_path):
    # The prompt is five tokens of the tiny vocabulary, as that of the published run is five tokens.
    return ResidencyOptions(
        "abcde", model_path, "fake", ("0.5b", "14b"), new=48, min_bucket=8, json=False, svg=None
    )


def counters_of(report, shape):
    return {
        (lane.capture, lane.in_place, lane.layout.startswith("head")): lane
        for lane in report.lanes
        if lane.shape == shape.name and lane.min_bucket == 8
    }


def assert_published_numbers(report):
    """Every figure that is known for the small model, and what follows for the large one."""
    assert report.same_tokens
    assert len(report.lanes[0].token_ids) == 48
    for shape, moved, copied in (
        (SMALL, 688_576, 344_064),
        (LARGE, 56 * (196_608 + 8), 56 * 196_608 * 7 // 8),
    ):
        lanes = counters_of(report, shape)
        if not lanes:
            continue
        assert {key: lane.counters for key, lane in lanes.items()} == COUNTERS
        for (_, in_place, head_major), lane in lanes.items():
            assert lane.growth_events == 3
            assert [step.length for step in lane.steps if step.grown] == [9, 17, 33]
            if in_place:
                assert lane.physical_bytes == lane.attributed_bytes == 2 * shape.layers * G
                # Three growths find their granules mapped.
                assert [step.billed_bytes for step in lane.steps if step.billed_bytes] == [
                    2 * shape.layers * G
                ]
                assert lane.kv_bytes_moved == (moved if head_major else 0)
                assert lane.actual_copy_bytes == (copied if head_major else 0)
            else:
                assert lane.physical_bytes == 64 * shape.bytes_per_token
                assert lane.kv_bytes_moved == moved
                assert lane.actual_copy_bytes == 56 * shape.bytes_per_token
        controls = [lane for lane in report.lanes if lane.shape == shape.name and lane.min_bucket == 64]
        assert [lane.counters for lane in controls] == [(1, 45, 1, 0)] * 2
        assert [(lane.growth_events, lane.kv_bytes_moved) for lane in controls] == [(0, 0)] * 2


def assert_crossing(report, equal_bits):
    """The separation by the number of heads, and what growth costs, by layout."""
    by_layout = {
        layout: [stage for stage in report.crossing if stage.layout == layout]
        for layout in ("seq_major", "head_major", "head_major_bucket")
    }
    assert sum(map(len, by_layout.values())) == len(report.crossing) == 9
    for stages in by_layout.values():
        assert [stage.tokens for stage in stages] == [100, 4_000, 16_000]
        for stage in stages:
            assert stage.driver_bytes == stage.planned_bytes == 96 * G * stage.granules_a_binding
            assert stage.equal_bits is equal_bits
    granules = {name: [one.granules_a_binding for one in stages] for name, stages in by_layout.items()}
    assert granules == {
        "seq_major": [1, 4, 16],
        "head_major": [8, 8, 16],
        "head_major_bucket": [1, 4, 16],
    }
    moved = {name: [one.bytes_moved for one in stages] for name, stages in by_layout.items()}
    assert moved == {
        "seq_major": [0, 0, 0],
        "head_major": [0, 0, 0],
        "head_major_bucket": [0, 128 * 196_608 * 7 // 8, 4096 * 196_608 * 7 // 8],
    }
    assert [(one.captures, one.growth_keeps) for one in by_layout["seq_major"]] == [(1, 0), (1, 1), (1, 2)]
    assert [one.replays for one in by_layout["seq_major"]] == [1, 4, 7]
    for name in ("head_major", "head_major_bucket"):
        assert [(one.captures, one.growth_keeps) for one in by_layout[name]] == [(1, 0), (2, 0), (3, 0)]


def test_a_decode_in_host_memory_gives_the_published_counters(options):
    report = measure(replace(options, shapes=("0.5b",)), FakeMachine())
    assert_published_numbers(report)
    assert report.crossing == ()
    assert report.lanes[0].steps[0].access == "launch"


class KernelDriver(FakeDriver):
    """A driver whose launches of the report's kernel compute in NumPy, over the addresses that they got."""

    def launcher(self, function, grid, block, shared_bytes, arguments, *, programmatic=False):
        launch = super().launcher(function, grid, block, shared_bytes, arguments, programmatic=programmatic)

        def run(stream):
            before = len(self.launched)
            launch(stream)
            for record in self.launched[before:]:
                self.compute(record)

        return run

    def launch_graph(self, executable, stream):
        before = len(self.launched)
        super().launch_graph(executable, stream)
        for record in self.launched[before:]:
            self.compute(record)

    def compute(self, record):
        assert record.symbol == SYMBOL
        p, kv_heads = Params.from_buffer_copy(record.params), record.grid[0]
        past, tokens = array(p.extent, (2,), np.int32).tolist()
        size = round(p.scale**-2)
        caches = []
        for cache, new in ((p.key_cache, p.key), (p.value_cache, p.value)):
            for head in range(kv_heads):  # only committed bytes
                nbytes = 2 * ((past + tokens - 1) * p.token_stride + size)
                self._reach(cache + 2 * head * p.head_stride, nbytes)
            view = as_strided(
                array(cache, (1,), np.float16),
                (kv_heads, past + tokens, size),
                (2 * p.head_stride, 2 * p.token_stride, 2),
            )
            view[:, past:] = array(new, (tokens, kv_heads, size), np.float16).swapaxes(0, 1)
            caches.append(view.copy())
        query = array(p.query, (tokens, kv_heads * p.group, size), np.float32)
        output = array(p.output, query.shape, np.float32)
        output[:] = attend(query, caches[0], caches[1], past, p.scale)


def array(address, shape, dtype):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype).reshape(shape)


def test_the_same_through_the_cuda_code(options):
    driver = KernelDriver(limit=64 << 30)
    machine = CudaMachine(Device(driver, 0))
    small = replace(options, shapes=("0.5b",))
    report = measure(small, machine)
    host = measure(small, FakeMachine())
    assert report.lanes == host.lanes
    assert (report.backend, report.device, report.crossing) == ("cuda", "fake GPU", ())
    # A capture, an instantiation and a graph for every layer in the cache; nothing stays behind.
    assert driver.calls["begin_capture"] == 24 * sum(lane.captures for lane in report.lanes)
    assert driver.calls["launch_graph"] > 0
    assert driver.executables == driver.mappings == driver.reservations == driver.handles == {}


def test_growth_across_granules_through_the_cuda_code():
    machine = CudaMachine(Device(KernelDriver(limit=16 << 30), 0))
    shape = replace(LARGE, layers=2, kv_heads=2, capacity=16_384)
    stages = crossing(machine, shape, (3, 2_100, 9_000))
    assert [stage.granules_a_binding for stage in stages] == [1, 1, 4, 2, 2, 4, 1, 1, 4]
    assert all(stage.equal_bits for stage in stages)
    assert [stage.driver_bytes for stage in stages] == [stage.planned_bytes for stage in stages]
    assert [(stage.captures, stage.growth_keeps) for stage in stages[2::3]] == [(1, 2), (3, 0), (3, 0)]


def lanes_of(path, kept, machine=None, longest=20):
    file = GgufFile(path)
    config = read_config(file)
    model = Llama(config, read_weights(file, config))
    machine = machine or FakeMachine()
    lanes = [machine.lane(variant, SMALL, config, longest) for variant in kept]
    return model, lanes, read_tables(file, config, longest)


def test_a_cache_that_loses_rows_is_caught(model_path):
    """The tokens depend on every row: what one lane forgets shows against another."""
    two = [Variant(True, True, True, 8), Variant(False, True, True, 8)]
    model, lanes, tables = lanes_of(model_path, two)
    broken = lanes[0]
    kept = broken.cache.ensure

    def forget(tokens):
        billed = kept(tokens)
        if tokens == 9:  # the growth moved the stripes; lose the second head's
            rows = broken.cache.rows(0)
            driver = broken.cache.pool.driver
            for layer in range(24):
                rows = broken.cache.rows(layer)
                for address in (rows.key_address, rows.value_address):
                    driver.view(address + 2 * rows.head_stride, 2 * rows.token_stride * 8)[:] = 0
        return billed

    broken.cache.ensure = forget
    decode(model, [3, 4, 5, 6, 7], lanes, 12, tables)
    assert lanes[0].token_ids[:4] == lanes[1].token_ids[:4]
    assert lanes[0].token_ids != lanes[1].token_ids


def test_a_graph_kept_over_a_moved_cache_would_be_caught(model_path):
    """Replaying with the stripes elsewhere reads the wrong rows: head-major must not be kept."""
    machine = CudaMachine(Device(KernelDriver(limit=64 << 30), 0))
    two = [Variant(True, True, True, 8), Variant(False, True, True, 8)]
    model, lanes, tables = lanes_of(model_path, two, machine)
    lanes[0].cache.graph.invalidate = lambda: None
    decode(model, [3, 4, 5, 6, 7], lanes, 12, tables)
    assert lanes[0].token_ids != lanes[1].token_ids


def test_refused_memory_is_told(model_path, monkeypatch):
    model, lanes, tables = lanes_of(model_path, [Variant(False, True, True, 8)])
    lanes[0].cache.pool.governor.reserve("everything else", 8 << 30)
    limit = lanes[0].cache.pool.governor
    monkeypatch.setattr(limit, "grant", lambda *_, **__: limit.reserve("x", 1 << 50))
    with pytest.raises(BackendError, match="refused"):
        decode(model, [3], lanes, 2, tables)


def test_a_gpu_without_room_is_told(options):
    machine = CudaMachine(Device(KernelDriver(limit=64 << 20), 0))
    with pytest.raises(BackendError, match="--shape"):
        measure(options, machine)


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"prompt": "a" * 600}, PromptError, "--new"),
        ({"prompt": ""}, PromptError, "empty"),
        ({"min_bucket": 1024}, OptionError, "--min-bucket"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(options, changes, error, word):
    with pytest.raises(error, match=word):
        measure(replace(options, **changes), FakeMachine())


def test_wide_heads_are_refused(options, tiny_model, tmp_path):
    path = tiny_model(width=320, heads=4, kv_heads=2, head_size=80).write(tmp_path / "wide.gguf")
    with pytest.raises(OptionError, match="80"):
        measure(replace(options, model=path), FakeMachine())


def test_the_machine_is_chosen_and_said(monkeypatch):
    assert select("fake").name == "fake"
    assert select("auto").name in ("fake", "cuda")
    monkeypatch.setattr("paged_cuda.device.require_driver", lambda: FakeDriver())
    assert select("auto").name == "cuda"


def test_cuda_without_a_gpu_is_a_line(monkeypatch):
    from paged_cuda import NoDriver

    def absent():
        raise NoDriver("driver", "libcuda", "no such library", "an NVIDIA driver")

    monkeypatch.setattr("paged_cuda.device.require_driver", absent)
    with pytest.raises(BackendError, match="fake needs no GPU"):
        select("cuda")
    assert select("auto").name == "fake"


def test_the_command_prints_and_draws(model_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    words = ["residency", "abcde", "--backend", "fake", "--model", str(model_path), "--shape", "0.5b"]
    picture = tmp_path / "residency.svg"
    assert main([*words, "--new", "12", "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "100,663,296" in text
    assert "the same tokens in all" in text
    first = picture.read_bytes()
    assert main([*words, "--new", "12", "--json", "--svg", str(picture)]) == 0
    assert picture.read_bytes() == first
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["same_tokens"], len(facts["lanes"])) == (1, True, 10)


def test_differing_tokens_are_status_1(options, monkeypatch, capsys):
    report = measure(replace(options, shapes=("0.5b",), new=2), FakeMachine())
    spoilt = replace(report, lanes=(replace(report.lanes[0], token_ids=(1, 2)), *report.lanes[1:]))
    monkeypatch.setattr(command, "measure", lambda *_: spoilt)
    assert command.run(options) == 1
    assert "THE TOKENS DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["0", "513", "x"])
def test_a_wrong_count_is_one_line(word, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["residency", "--new", word])
    assert stopped.value.code == 2
    assert "--new" in capsys.readouterr().err


def test_variants_of_a_longer_text_get_larger_controls():
    assert {variant.min_bucket for variant in variants(8, 100)} == {8, 128}


def test_the_demos_model_gives_the_same_and_what_the_page_shows(tmp_path):
    """The real model, both shapes, 48 tokens: the reference's ids in all twenty caches."""
    picture = tmp_path / "residency.svg"
    words = [
        sys.executable,
        "-m",
        "paged_bench",
        "residency",
        "--backend",
        "fake",
        "--json",
        "--svg",
        picture,
    ]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    report = read_report(done.stdout)
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    reference = next(case["new_ids"] for case in cases if case["prompt"] == report.prompt)[:48]
    assert len(report.lanes) == 20
    assert {lane.token_ids[: len(reference)] for lane in report.lanes} == {tuple(reference)}
    assert_published_numbers(report)
    assert_crossing(report, None)
    assert render(report) in (DOCS / "residency.md").read_text(encoding="utf-8"), "print the page's text anew"
    drawn = (DOCS / "_static" / "residency.svg").read_bytes()
    assert picture.read_bytes() == drawn, (
        "paged-bench residency --backend fake --svg docs/_static/residency.svg"
    )
    assert figure(report).encode() == drawn


def test_the_report_of_a_gpu_has_the_same_numbers_and_the_pages_table():
    """A run on an H200 with random weights; its replays had the bits of launches over fresh memory."""
    report = read_report((DOCS / "_static" / "residency-h200.json").read_text(encoding="utf-8"))
    assert (report.backend, report.device) == ("cuda", "NVIDIA H200")
    assert_published_numbers(report)
    assert_crossing(report, True)
    assert growth_table(report.crossing) in (DOCS / "residency.md").read_text(encoding="utf-8")


def read_report(text):
    facts = json.loads(text)
    assert facts.pop("format") == 1
    same = facts.pop("same_tokens")

    def rows(kind, name):
        return tuple(kind(**{key: tupled(value) for key, value in row.items()}) for row in facts[name])

    lanes = tuple(
        replace(lane, steps=tuple(StepResult(**step) for step in lane.steps))
        for lane in rows(LaneResult, "lanes")
    )
    kinds = {"floors": FloorResult, "placements": PlacementResult, "crossing": CrossingResult}
    report = Report(**facts | {name: rows(kind, name) for name, kind in kinds.items()} | {"lanes": lanes})
    assert report.same_tokens is same
    return report


def tupled(value):
    return tuple(value) if isinstance(value, list) else value
