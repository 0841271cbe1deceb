"""The CPU suite and the interleaved comparison, over small trees with benchmarks of known times."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paged_bench.ab.sides import Side
from paged_bench.cli import main
from paged_bench.cpu.block import MOST_SAMPLES, case_id, run_block
from paged_bench.errors import BenchError
from paged_bench.record import Case, Environment, Record, Samples, Suite, joined, load, tree_digest

PACKAGES = Path(__file__).resolve().parents[2]

BENCHMARKS = """
import pytest
from paged_kv.pause import pause

def test_pause(benchmark):
    benchmark.extra_info.update(title="a pause", size=3)
    benchmark.pedantic(pause, rounds=30)

def test_many(benchmark):
    benchmark.pedantic(int, rounds=1000)

@pytest.mark.parametrize("kind", ["one", "Two Words"])
def test_kinds(benchmark, kind):
    benchmark.pedantic(int, rounds=5)

def test_broken(benchmark):
    raise RuntimeError("on purpose")
"""
PAUSE = """
import time

def pause():
    end = time.perf_counter_ns() + {us} * 1000
    while time.perf_counter_ns() < end:
        pass
"""


def git(tree, *words):
    name = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid")
    subprocess.run(["git", "-C", str(tree), *name, *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A checkout with the real packages, one more module, and benchmarks of it."""
    root = tmp_path_factory.mktemp("tree")
    for package in PACKAGES.iterdir():
        if (package / "src").is_dir():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(package / "src", root / "packages" / package.name / "src", ignore=leave)
    folder = root / "packages" / "paged-kv"
    (folder / "src" / "paged_kv" / "pause.py").write_text(PAUSE.format(us=500), encoding="utf-8")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "bench_pause.py").write_text(BENCHMARKS, encoding="utf-8")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "a tree")
    return root


@pytest.fixture
def from_tree(tree, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tree / "packages" / "paged-kv" / "src"))
    return tree


def test_the_suite_becomes_a_record(from_tree, tmp_path, capsys):
    out = tmp_path / "new" / "cpu.json"
    assert main(["cpu", "--root", str(from_tree), "--out", str(out), "--blocks", "2"]) == 1
    record = load(out)
    assert "on purpose" in capsys.readouterr().out
    assert (record.kind, record.stopped) == ("cpu", None)
    assert record.revision is not None
    assert [(case.id, bool(case.failed)) for case in record.cases] == [
        ("kv/pause", False),
        ("kv/many", False),
        ("kv/kinds/one", False),
        ("kv/kinds/two-words", False),
        ("kv/broken", True),
    ]
    pause = record.case("kv/pause")
    assert (pause.title, pause.parameters) == ("a pause", {"size": 3})
    assert pause.samples().blocks == (30, 30)
    assert 500 <= pause.samples().median < 5000
    many = record.case("kv/many").samples()
    assert len(many.blocks) == 2
    assert all(MOST_SAMPLES / 2 < size <= MOST_SAMPLES for size in many.blocks)


def test_turns_of_two_trees_are_compared_and_the_checkout_is_taken_away(tree, tmp_path, capsys):
    changed = tree / "packages" / "paged-kv" / "src" / "paged_kv" / "pause.py"
    changed.write_text(PAUSE.format(us=900), encoding="utf-8")
    words = ["--select", "pause or one", "--rounds", "2", "--out", str(tmp_path / "ab")]
    page = tmp_path / "page.html"
    try:
        assert main(["ab", "--base", "HEAD", "--root", str(tree), *words, "--html", str(page)]) == 1
    finally:
        git(tree, "checkout", "--quiet", ".")
    told = capsys.readouterr().out
    assert "1 much slower" in told
    assert "different times" not in told
    base, head = (load(tmp_path / "ab" / f"{side}.json") for side in ("base", "head"))
    assert base.session == head.session
    assert (base.revision.dirty, head.revision.dirty) == (False, True)
    assert base.code["paged_kv"] != head.code["paged_kv"]
    assert base.code["paged_schema"] == head.code["paged_schema"]
    assert base.case("kv/pause").samples().blocks == (30, 30)
    assert 1.5 < head.case("kv/pause").samples().median / base.case("kv/pause").samples().median < 2.1
    assert "much slower" in page.read_text(encoding="utf-8")
    listed = subprocess.run(
        ["git", "-C", tree, "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1


def a_part(us):
    environment = Environment(python="3.12", system="Linux", cpu="a processor", load=(1.0, 2.0))
    return Record(
        kind="cpu", what="a part", created="2026-11-29T10:00:00Z", suite=Suite(name="cpu"),
        environment=environment, cases=(one("kv/a", *[us] * 5),),
    )  # fmt: skip


def test_an_interrupt_keeps_whole_rounds(tree, tmp_path, monkeypatch, capsys):
    order = []

    def turn(side, head, words, out):
        order.append(side.name)
        if len(order) == 6:
            raise KeyboardInterrupt
        return a_part({"base": 10.0, "head": 20.0}[side.name])

    monkeypatch.setattr("paged_bench.ab.command.turn", turn)
    words = ["ab", "--base", "HEAD", "--root", str(tree), "--suite", "quick", "--rounds", "4"]
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "2 of 4 rounds" in capsys.readouterr().err
    assert order == ["base", "head", "head", "base", "base", "head"]
    for name, us in (("base", 10.0), ("head", 20.0)):
        record = load(tmp_path / f"{name}.json")
        assert record.stopped == "after 2 of 4 rounds"
        assert record.cases[0].samples().values == (us,) * 10
        assert record.cases[0].samples().blocks == (5, 5)


def test_a_turn_over_another_tree_is_not_believed(tree):
    side = Side("base", tree, None)
    with pytest.raises(BenchError, match="does not say"):
        side.check(a_part(1.0), tree)
    digest = tree_digest(tree / "packages" / "paged-kv" / "src" / "paged_kv")
    side.check(a_part(1.0).model_copy(update={"code": {"paged_kv": digest}}), tree)
    with pytest.raises(BenchError, match="paged_kv: was not imported from the tree of the base"):
        side.check(a_part(1.0).model_copy(update={"code": {"paged_kv": "0" * 64}}), tree)


def test_the_base_is_measured_by_the_paged_bench_of_the_head(tree, tmp_path):
    base = tmp_path / "packages" / "paged-bench" / "src" / "paged_bench"
    base.mkdir(parents=True)
    (base / "older.py").write_text("", encoding="utf-8")
    digests = [tree_digest(tree / "packages" / "paged-bench" / "src" / "paged_bench"), tree_digest(base)]
    heads, bases = (a_part(1.0).model_copy(update={"code": {"paged_bench": one}}) for one in digests)
    Side("base", tmp_path, None).check(heads, tree)
    with pytest.raises(BenchError, match="paged_bench: was not imported from the tree of the head"):
        Side("base", tmp_path, None).check(bases, tree)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["cpu", "--root", "{empty}", "--out", "{out}"], "benchmarks/bench_"),
        (
            ["cpu", "--root", "{tree}", "--out", "{out}", "--select", "nothing_like_it"],
            "chooses no benchmark",
        ),
        (["cpu", "--root", "{tree}", "--out", "{empty}"], "directory"),
        (["cpu", "--root", "{tree}", "--out", "{out}", "--select", "not ("], "pytest"),
        (["ab", "--base", "no-such-revision", "--root", "{tree}", "--out", "{empty}/ab"], "names no commit"),
        (["ab", "--base", "--version", "--root", "{tree}", "--out", "{empty}/ab"], "--base"),
        (["ab", "--base", "HEAD", "--root", "{empty}", "--out", "{empty}/ab"], "no source tree"),
        (["ab", "--base", "HEAD", "--root", "{tree}", "--suite", "nope", "--out", "{empty}/ab"], "nope"),
        (["ab", "--base", "HEAD", "--suite", "quick", "--select", "a", "--out", "{empty}/ab"], "--select"),
    ],
)
def test_bad_input_is_one_line_and_status_2(from_tree, tmp_path, capsys, words, named):
    (tmp_path / "empty").mkdir()
    places = {"tree": from_tree, "empty": tmp_path / "empty", "out": tmp_path / "out.json"}
    try:
        status = main([word.format(**places) for word in words])
    except SystemExit as stopped:  # argparse
        status = stopped.code
    told = capsys.readouterr().err
    lines = [line for line in told.splitlines() if not line.startswith(("block", "round"))]
    assert (status, len(lines)) == (2, 1), told
    assert named in lines[0]


def test_without_a_finished_block_no_file_is_left_or_spoken_of(from_tree, tmp_path, monkeypatch, capsys):
    def interrupt(files, select):
        raise KeyboardInterrupt

    monkeypatch.setattr("paged_bench.cpu.command.run_block", interrupt)
    out = tmp_path / "cpu.json"
    words = ["cpu", "--root", str(from_tree), "--out", str(out)]
    assert main(words) == 2
    assert not out.exists()
    out.write_text("somebody's", encoding="utf-8")
    assert main(words) == 2
    assert out.read_text(encoding="utf-8") == "somebody's"
    told = capsys.readouterr().err
    assert told.count("interrupted; no block was finished") == 2
    assert "holds" not in told


@pytest.mark.parametrize(("option", "value"), [("--blocks", "0"), ("--blocks", "x"), ("--blocks", "1e3")])
def test_a_count_is_a_count(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["cpu", "--out", "x", option, value])
    assert stopped.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupt_keeps_the_finished_blocks(from_tree, tmp_path):
    out = tmp_path / "cpu.json"
    words = ["cpu", "--root", str(from_tree), "--out", str(out), "--select", "one", "--blocks", "100"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paged_bench", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not out.exists() or not out.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to pytest as well
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2, told
    assert "Traceback" not in told
    record = load(out)
    assert record.stopped is not None
    assert record.case("kv/kinds/one") is not None


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_request_to_end_leaves_no_checkout_behind(tree, tmp_path):
    words = ["ab", "--base", "HEAD", "--root", str(tree), "--select", "one", "--rounds", "100"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paged_bench", *words, "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "round 1" in process.stderr.readline()  # the base is checked out by now
    process.terminate()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2, told
    assert "ab: interrupted; 0 of 100 rounds" in told
    listed = subprocess.run(
        ["git", "-C", tree, "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_a_b", "kv/a-b"),
        ("test_a[512-0]", "kv/a/512-0"),
        ("test_a[x y/Z]", "kv/a/x-y-z"),
        ("test_a[1.5]", "kv/a/1.5"),
    ],
)
def test_ids_follow_from_names(name, expected):
    assert case_id("paged-kv", name) == expected


def test_a_file_that_cannot_be_imported_costs_no_other_file(tmp_path):
    texts = {"a": "def test_fast(benchmark):\n    benchmark(int)\n", "b": "import paged_kv.no_such_module\n"}
    files = []
    for name, text in texts.items():
        files.append(tmp_path / "packages" / f"paged-{name}" / "benchmarks" / f"bench_{name}.py")
        files[-1].parent.mkdir(parents=True)
        files[-1].write_text(text, encoding="utf-8")
    cases = {case.id: case for case in run_block(files)}
    assert cases.pop("a/fast").samples() is not None
    ((name, broken),) = cases.items()
    assert name.startswith("b/")
    assert broken.failed is not None
    assert "collection failure" in broken.failed or "no_such_module" in broken.failed


def a_file(folder, text):
    path = folder / "packages" / "paged-a" / "benchmarks" / "bench_a.py"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_two_benchmarks_of_one_id_are_not_mixed(tmp_path):
    mark = "import pytest\n@pytest.mark.parametrize('x', [1, -1])\n"
    path = a_file(tmp_path, mark + "def test_a(benchmark, x):\n    benchmark.pedantic(int, rounds=5)\n")
    with pytest.raises(BenchError, match=r"test_a\[1\] and test_a\[-1\] both have the id a/a/1"):
        run_block([path])


def test_extra_info_of_any_kind_goes_into_the_record(tmp_path):
    note = "    benchmark.extra_info.update(sizes=[1, 2], none=None, flag=True)\n"
    path = a_file(tmp_path, f"def test_a(benchmark):\n{note}    benchmark.pedantic(int, rounds=5)\n")
    (case,) = run_block([path])
    assert case.parameters == {"sizes": "[1, 2]", "none": "null", "flag": True}


def one(name, *values, failed=None, **extra):
    series = () if failed else (Samples(what="call", timing="wall", values=values, **extra),)
    return Case(id=name, title=name, group="g", failed=failed, series=series)


def test_parts_stay_blocks_and_a_failure_stays_a_failure():
    parts = [
        [one("a", 1.0, 2.0), one("b", 1.0)],
        [one("a", 3.0, 4.0, 5.0, blocks=(1, 2)), one("b", failed="why")],
    ]
    a, b = joined(parts)
    assert a.samples().values == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert a.samples().blocks == (2, 1, 2)
    assert (b.failed, b.series) == ("why", ())
