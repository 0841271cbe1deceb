"""The command as people start it: exit statuses, one line for an error, nothing but JSON with --json."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.tokenizer import TextCodec

# The subprocess must see no GPU, whatever the machine has.
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
COMMAND = (sys.executable, "-m", "paged_bench")


def demo(*words, **options):
    return subprocess.run(
        [*COMMAND, "demo", *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        env=ENVIRONMENT,
        timeout=120,
        check=False,
        **options,
    )


def refusal(*words):
    done = demo(*words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_json_is_the_only_thing_on_standard_output(tiny_path):
    prompts = ["the first", "a second one", "third"]
    done = demo(*prompts, "--model", tiny_path, "--json", "--max-new", "6", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    codec = TextCodec(GgufFile(tiny_path))
    assert [result["prompt"] for result in results] == prompts
    for result in results:
        assert set(result) == {"prompt", "prompt_ids", "new_ids", "text"}
        assert result["prompt_ids"] == codec.encode(result["prompt"])
        assert len(result["new_ids"]) == 6
        assert result["text"] == codec.decode(result["new_ids"])
    assert "page reuse" in done.stderr


def test_layouts_and_block_sizes_give_the_same_ids(tiny_path):
    common = ("the same", "prompts", "--model", tiny_path, "--json", "--max-new", "20", "--ignore-eos")
    seen = {
        demo(*common, "--layout", layout, "--block-size", size).stdout
        for layout, size in (("latent", 16), ("latent", 64), ("separate", 32))
    }
    assert len(seen) == 1
    assert json.loads(seen.pop())


def test_the_built_in_run_waits_for_pages_mixes_and_reuses(tiny_path):
    done = demo("--model", tiny_path)
    assert done.returncode == 0, done.stderr
    assert "backend oracle" in done.stdout
    table = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in done.stdout.splitlines()
        if "│" in line
    }
    assert {"tokens", "tokens/s", "peak pages", "page reuse", "time in attention", "admission"} <= set(table)
    assert int(table["admission"].split()[-2]) > 0
    assert int(table["steps"].split()[3]) > 0
    assert int(table["page reuse"].split()[3]) > 0
    for number in range(1, 11):
        assert f"#{number} " in done.stdout


def test_prompts_from_a_file_keep_their_order(tiny_path, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\nthree\n", encoding="utf-8")
    done = demo("zero", "--prompts", file, "--model", tiny_path, "--json", "--max-new", "2")
    assert [result["prompt"] for result in json.loads(done.stdout)] == ["zero", "one", "two", "three"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_run_on_the_oracle(tiny_path, dtype):
    done = demo("hello", "--model", tiny_path, "--json", "--dtype", dtype, "--max-new", "3", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)[0]["new_ids"]) == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--max-new", "0"), "--max-new"),
        (("--max-new", "-3"), "--max-new"),
        (("--max-new", "many"), "--max-new"),
        (("--block-size", "48"), "--block-size"),
        (("--layout", "diagonal"), "--layout"),
        (("--dtype", "int8"), "--dtype"),
        (("--unknown",), "--unknown"),
        (("",), "prompt 1"),
        (("--prompts", "absent.txt"), "absent.txt"),
        (("--model", "absent.gguf"), "absent.gguf"),
        (("--pages", "0"), "--pages"),
        (("--backend", "cuda", "--dtype", "float32"), "float32"),
    ],
)
def test_bad_words_are_one_line_and_status_2(tiny_path, words, named):
    model = () if "--model" in words else ("--model", tiny_path)
    assert named in refusal(*words, *model)


def test_no_subcommand_and_an_unknown_one():
    for words in ((), ("dance",)):
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


def test_the_simulator_is_a_subcommand():
    words = [*COMMAND, "simulate", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "simulate" in done.stdout


def test_no_gpu_is_one_line(tiny_path):
    assert "--backend oracle" in refusal("hello", "--backend", "cuda", "--model", tiny_path)


def test_separate_on_cuda_is_not_implemented(tiny_path):
    line = refusal("hello", "--backend", "cuda", "--layout", "separate", "--model", tiny_path)
    assert "separate" in line
    assert "--layout latent" in line


def test_a_prompt_longer_than_the_pool_names_the_way_out(tiny_path):
    line = refusal("a" * 200, "--pages", "3", "--model", tiny_path)
    assert "prompt 1" in line
    assert "--pages" in line


def test_a_prompt_longer_than_the_context(tiny_path):
    assert "context" in refusal("a" * 600, "--model", tiny_path)


def test_a_broken_model_is_one_line(tmp_path, tiny_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(tiny_path.read_bytes()[:5000])
    assert "broken.gguf" in refusal("hello", "--model", path)


def test_bytes_that_are_no_text_are_one_line(tiny_path):
    done = subprocess.run(
        [*COMMAND, "demo", b"\xff\xfe", "--model", str(tiny_path)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("option", ["--json", "--ignore-eos"])
def test_a_reader_that_goes_away_is_no_traceback(tiny_path, option):
    command = f"'{sys.executable}' -m paged_bench demo --model '{tiny_path}' {option} hello"
    shell = f"{command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("redirection", "status", "lines"),
    [(">&-", 2, 1), (">&- 2>&-", 2, 0), ("2>&-", 0, 0), (">/dev/full", 2, 1)],
)
@pytest.mark.parametrize("option", ["--json", "--ignore-eos"])
def test_closed_and_full_streams_are_no_traceback(tiny_path, redirection, status, lines, option):
    words = [*COMMAND, "demo", "--model", str(tiny_path), "--max-new", "2", option, "hello"]
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("paged-bench:")]) == lines


def test_a_reader_of_progress_that_goes_away_costs_no_result(tiny_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "demo", "--model", str(tiny_path), "--json", "--max-new", "2", "hello"],
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 0
    assert [result["prompt"] for result in json.loads(done.stdout)] == ["hello"]


def test_a_model_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    assert "is a pipe" in refusal("hello", "--model", tmp_path / "model.gguf")


def test_a_missing_tensor_is_one_line(tmp_path, tiny_model):
    model = tiny_model()
    del model.tensors["blk.1.ffn_up.weight"]
    assert "blk.1.ffn_up.weight" in refusal("hello", "--model", model.write(tmp_path / "model.gguf"))


def test_an_output_without_unicode_is_no_traceback(tiny_path):
    done = subprocess.run(
        [*COMMAND, "demo", "caf\u00e9", "--model", str(tiny_path), "--max-new", "2"],
        capture_output=True,
        timeout=60,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_interrupt_is_status_130(tiny_path):
    words = [
        "demo",
        "a" * 400,
        "--model",
        str(tiny_path),
        "--max-new",
        "100",
        "--ignore-eos",
        "--max-batch",
        "1",
    ]
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_the_entry_point_is_installed():
    script = Path(sys.executable).with_name("paged-bench")
    done = subprocess.run([script, "demo", "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "--layout" in done.stdout


def test_help_opens_no_model_reader_and_no_gpu_library():
    code = (
        "import sys, contextlib, io\n"
        "from paged_bench.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['demo', '--help'])\n"
        "print([name for name in ('gguf', 'tokenizers', 'cuda', 'rich') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
