"""The simulator: traces, the clock, policies, and that nothing is lost."""

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from paged_bench.errors import OptionError
from paged_bench.simulate import add_parser, main
from paged_bench.simulate.engine import Engine, Simulation, TimeModel
from paged_bench.simulate.report import svg, table
from paged_bench.simulate.trace import NO_GROUP, Trace, TraceError, Traffic, generate, read_csv


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    arrival, prompt, output = zip(*requests, strict=True)
    lengths = [np.array(values, dtype=np.int64) for values in (prompt, output)]
    none, count = np.full(len(requests), NO_GROUP), len(requests)
    return Trace(np.array(arrival), *lengths, none, np.zeros(count, dtype=np.int64), "by hand")


def test_the_clock_is_the_time_model() -> None:
    """Prompt of 3 in one step that gives the first token, then two decoding steps."""
    times = TimeModel(base=1.0, per_token=0.1, per_context=0.01)
    outcome = Simulation(trace_of((5.0, 3, 3)), Engine(blocks=4), times).run()
    expected = 5.0 + (1 + 0.3 + 0.03) + (1 + 0.1 + 0.04) + (1 + 0.1 + 0.05)
    assert outcome.seconds == pytest.approx(expected)
    assert (outcome.steps, outcome.tokens) == (3, 5)
    assert outcome.latencies[0] == pytest.approx(expected - 5.0)
    assert outcome.queue_waits[0] == 0


def test_prompts_share_the_step_budget() -> None:
    trace = trace_of((0.0, 50, 1), (0.0, 50, 1))
    outcome = Simulation(trace, Engine(blocks=16, step_tokens=40), TimeModel()).run()
    assert outcome.steps == 3
    assert outcome.tokens == 100


def test_a_request_that_never_fits_is_refused_and_the_others_finish() -> None:
    trace = trace_of((0.0, 20, 5), (0.0, 10_000, 5), (0.0, 20, 5))
    outcome = Simulation(trace, Engine(blocks=8), TimeModel()).run()
    assert (outcome.finished, outcome.refused) == (2, 1)
    assert np.isnan(outcome.latencies[1])
    assert outcome.stats.num_pages_free == 8


def test_waiting_for_pages_keeps_the_order() -> None:
    trace = trace_of(*[(0.0, 60, 4)] * 6)
    outcome = Simulation(trace, Engine(blocks=8), TimeModel()).run()
    assert outcome.finished == 6
    assert outcome.deferred_steps > 0
    assert np.array_equal(outcome.queue_waits, np.sort(outcome.queue_waits))
    assert outcome.stats.preemptions_total == 0


@pytest.mark.parametrize("optimistic", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_every_policy_finishes_everything(optimistic: bool, prefix_cache: bool) -> None:
    trace = generate(
        Traffic(requests=400, rate=200.0, prompt=100, output=80, longest=600, prefix=64, groups=3)
    )
    engine = Engine(blocks=150, max_batch=32, optimistic=optimistic, prefix_cache=prefix_cache)
    outcome = Simulation(trace, engine, TimeModel()).run()
    assert outcome.finished == 400
    assert outcome.stats.num_pages_free == 150
    assert outcome.stats.num_sequences == 0
    assert (outcome.stats.preemptions_total > 0) == optimistic
    assert (outcome.hits > 50) == prefix_cache
    if not optimistic:
        needed = int((trace.prompt + trace.output - 1).sum())
        assert outcome.tokens + outcome.hit_tokens == needed


def test_a_larger_pool_never_waits_longer() -> None:
    trace = generate(Traffic(requests=300, rate=100.0, prompt=200, output=60, shared=0.0))
    waits = []
    for blocks in (400, 800, 3_200):
        outcome = Simulation(trace, Engine(blocks=blocks), TimeModel()).run()
        waits.append(float(outcome.queue_waits.mean()))
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > waits[2]


def test_generated_traffic_is_what_was_stated() -> None:
    traffic = Traffic(requests=20_000, rate=50.0, prompt=300, output=90, shared=0.25, groups=4, prefix=32)
    trace = generate(traffic)
    assert np.diff(trace.arrival).mean() == pytest.approx(1 / 50, rel=0.05)
    assert np.median(trace.prompt - trace.prefix) == pytest.approx(300, rel=0.05)
    assert np.median(trace.output) == pytest.approx(90, rel=0.05)
    assert (trace.group >= 0).mean() == pytest.approx(0.25, abs=0.02)
    assert set(trace.prefix[trace.group >= 0]) == {32}
    assert np.array_equal(generate(traffic).prompt, trace.prompt)


@pytest.mark.parametrize(
    "change", [{"rate": 0}, {"requests": 0}, {"shared": 2}, {"prefix": -1}, {"spread": -1}, {"seed": -1}]
)
def test_traffic_that_cannot_be_is_refused(change: dict) -> None:
    with pytest.raises(TraceError):
        generate(Traffic(**change))


def test_a_trace_file_is_sorted_and_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output,prefix_group,prefix\n2.5,40,3,1,32\n1.0,7,2,,\n")
    trace = read_csv(path)
    assert trace.arrival.tolist() == [1.0, 2.5]
    assert trace.prompt.tolist() == [7, 40]
    assert trace.group.tolist() == [NO_GROUP, 1]
    assert trace.prefix.tolist() == [0, 32]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "arrival,prompt\n1,2\n",
        "arrival,prompt,output\n",
        "arrival,prompt,output\nx,2,3\n",
        "arrival,prompt,output\n1,0,3\n",
        "arrival,prompt,output\n1,2,-3\n",
        "arrival,prompt,output\n1,2\n",
        "arrival,prompt,output\nnan,2,3\n",
        "arrival,prompt,output,prefix_group,prefix\n1,2,3,0,9\n",
        f"arrival,prompt,output,prefix_group,prefix\n1,2,3,{2**70},1\n",
        "arrival,prompt,output,prefix_group,prefix\n1,2,3,-5,1\n",
        f"arrival,prompt,output\n1,{2**31 - 1},{2**31 - 1}\n",
        "arrival,prompt,output\n1,2," + "9" * 200_000,
    ],
)
def test_a_broken_trace_file_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.csv"):
        read_csv(path)


def test_the_command_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "run.svg"
    words = [
        "--requests",
        "60",
        "--rate",
        "50",
        "--prompt",
        "60",
        "--output",
        "20",
        "--pages",
        "200",
        "--svg",
    ]
    assert main([*words, str(drawing)]) == 0
    text = capsys.readouterr().out
    for name in ("pages in use", "prefix hits", "preemptions", "deferrals", "nothing lost"):
        assert name in text
    root = ElementTree.fromstring(drawing.read_text())
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    assert all(line.get("points") for line in lines)


@pytest.mark.parametrize(
    "words",
    ["--pages 0", "--block-size 20", "--watermark 5000", "--base -1", "--max-batch 0", "--step-tokens 0"],
)
def test_options_out_of_range_are_refused(words: str) -> None:
    with pytest.raises(OptionError):
        main(words.split())


def test_samples_are_thinned_and_drawn(tmp_path: Path) -> None:
    trace = generate(Traffic(requests=600, rate=30.0, prompt=20, output=60, shared=0.0))
    engine = Engine(blocks=2_000, max_batch=8)
    outcome = Simulation(trace, engine, TimeModel()).run()
    assert outcome.steps > 2_048
    assert 512 < len(outcome.samples.time) <= 2_048
    assert svg(engine, outcome.samples).startswith("<svg")
    assert "600 of 600" in table(trace, engine, outcome)


def test_the_command_hangs_on_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    values = parser.parse_args(["simulate", "--requests", "5", "--pages", "100", "--prefix", "16"])
    assert values.run(values) == 0
    assert "5 of 5" in capsys.readouterr().out


def test_a_trace_file_that_is_no_text_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfearrival")
    with pytest.raises(TraceError, match=r"trace\.csv"):
        read_csv(path)


def test_a_broken_line_is_counted_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n\n\n1,2,x\n")
    with pytest.raises(TraceError, match="line 4"):
        read_csv(path)


def test_a_spreadsheet_s_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbfarrival, prompt, output\r\n1, 2, 3\r\n")
    assert read_csv(path).output.tolist() == [3]


def test_a_prefix_that_never_fits_is_not_hashed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output,prefix_group,prefix\n1,2000000000,3,1,1900000000\n2,5,3,,\n")
    outcome = Simulation(read_csv(path), Engine(blocks=8), TimeModel()).run()
    assert (outcome.finished, outcome.refused) == (1, 1)


@pytest.mark.parametrize("start", [-1e6, 1.7e9])
def test_arrivals_may_count_from_any_moment(start: float) -> None:
    requests = [(0.0, 20, 5), (1.0, 20, 5)]
    plain, moved = trace_of(*requests), trace_of(*[(start + at, *rest) for at, *rest in requests])
    engine = Engine(blocks=8)
    first, second = (Simulation(trace, engine, TimeModel()).run() for trace in (plain, moved))
    assert second.queue_waits == pytest.approx(first.queue_waits, abs=1e-5)
    shown = [
        table(trace, engine, outcome).splitlines() for trace, outcome in ((plain, first), (moved, second))
    ]
    assert [line for line in shown[0] if line.startswith("simulated")] == [
        line for line in shown[1] if line.startswith("simulated")
    ]
    x = [
        float(point.split(",")[0])
        for point in svg(engine, second.samples).split('points="')[1].split('"')[0].split()
    ]
    assert min(x) == 56
    assert max(x) == 804
