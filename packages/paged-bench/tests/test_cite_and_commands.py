"""The commands over records: exit statuses, files that are written, tables, and marks of history."""

import json
import os
import subprocess
import sys

import pytest
from paged_bench.cite.figures import figures
from paged_bench.cite.table import table
from paged_bench.cli import main
from paged_bench.errors import RecordError
from paged_bench.record import (
    Case,
    Ceiling,
    Correctness,
    Environment,
    Gpu,
    Kernels,
    Memory,
    PeerRow,
    Record,
    Samples,
    Shape,
    Suite,
    Work,
    load,
    present_kernels,
    save,
)

SHAPE = Shape(
    layout="LATENT", dtype="bfloat16", cache_dtype="bfloat16", heads=16, head_size=576, v_head_size=512,
    block_size=64, batch=1, context=4096.0,
)  # fmt: skip
GPU = Gpu(name="H200", compute_capability="9.0", multiprocessors=132, driver="13.0")


def samples(us, what="attend+combine", timing="graph"):
    return Samples(what=what, timing=timing, values=(us,) * 9, calls=16)


def a_record(us=10.0, **fields):
    work = Work(bytes=4_000_000, operations=1)
    case = Case(
        id="latent/b1", title="1 x 4,096", group="decode", shape=SHAPE, work=work,
        correctness=Correctness(reference="an oracle", relative_error=0.00172),
        series=(samples(us), samples(us + 6, "step")),
    )  # fmt: skip
    failed = Case(id="latent/b2", title="2 x 4,096", group="decode", shape=SHAPE, failed="no memory")
    filled = {
        "kind": "gpu", "what": "A test.", "created": "2026-11-29T10:00:00Z", "suite": Suite(name="standard"),
        "environment": Environment(python="3.12", system="Linux", cpu="a processor", gpu=GPU),
        "ceilings": tuple(
            Ceiling(what=what, value=value, method="m") for what, value in (("read", 4e12), ("matmul", 8e14))
        ),
        "kernels": present_kernels(["append.cu"]), "cases": (case, failed),
    }  # fmt: skip
    return Record(**(filled | fields))


def plain(name, *values, **parameters):
    series = (Samples(what="call", timing="wall", values=values),)
    return Case(id=name, title=name.title(), group="kv", parameters=parameters, series=series)


@pytest.fixture
def files(tmp_path):
    made = {"base": 10.0, "same": 10.1, "slower": 12.0, "red": 14.0, "faster": 8.0}
    for name, us in made.items():
        save(a_record(us), tmp_path / f"{name}.json")
    return tmp_path


@pytest.mark.parametrize(
    ("head", "fail_on", "status"),
    [
        ("same", "slower", 0),
        ("slower", "slower", 1),
        ("slower", "much-slower", 0),
        ("red", "much-slower", 1),
        ("red", "never", 0),
        ("faster", "slower", 0),
    ],
)
def test_the_exit_status_follows_the_rule(files, capsys, head, fail_on, status):
    words = ["compare", str(files / "base.json"), str(files / f"{head}.json"), "--fail-on", fail_on]
    assert main(words) == status
    assert "1 x 4,096" in capsys.readouterr().out


def test_all_outputs_are_of_one_comparison(files, capsys):
    names = {kind: files / f"out.{kind}" for kind in ("markdown", "html", "action")}
    words = [word for kind, path in names.items() for word in (f"--{kind}", str(path))]
    assert main(["compare", str(files / "base.json"), str(files / "slower.json"), *words]) == 0
    told = capsys.readouterr().out
    texts = {kind: path.read_text(encoding="utf-8") for kind, path in names.items()}
    for text in (told, texts["markdown"], texts["html"]):
        assert "+20.0%" in text
        assert "fails in both" in text
        assert "no memory" in text
        assert "whole" in text
    assert [entry["value"] for entry in json.loads(texts["action"])] == [12.0, 18.0]
    assert "<script" not in texts["html"]
    assert "prefers-color-scheme:dark" in texts["html"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_a_reader_that_goes_away_is_no_slowdown(files):
    reading, writing = os.pipe()
    os.close(reading)
    words = ["compare", str(files / "base.json"), str(files / "same.json"), "--html", str(files / "a.html")]
    try:
        command = [sys.executable, "-m", "paged_bench", *words]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
    assert (files / "a.html").exists()


def test_the_page_has_the_same_bytes_each_time(files):
    for name in ("one.html", "two.html"):
        main(["compare", str(files / "base.json"), str(files / "red.json"), "--html", str(files / name)])
    assert (files / "one.html").read_bytes() == (files / "two.html").read_bytes()


def refusal(words, capsys):
    assert main([str(word) for word in words]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    return told.err


def test_what_cannot_be_compared_is_one_line_and_status_2(files, capsys):
    base = files / "base.json"
    other = a_record().model_copy(
        update={"environment": Environment(python="3.12", system="Linux", cpu="another", gpu=GPU)}
    )
    save(other, files / "other.json")
    assert "processor" in refusal(["compare", base, files / "other.json"], capsys)
    assert main(["compare", str(base), str(files / "other.json"), "--force"]) == 0
    assert "Forced" in capsys.readouterr().out
    assert "absent.json" in refusal(["compare", base, files / "absent.json"], capsys)
    assert "irectory" in refusal(["compare", base, base, "--html", files], capsys)
    (files / "cut.json").write_bytes(base.read_bytes()[:500])
    assert "truncated" in refusal(["compare", base, files / "cut.json"], capsys)
    (files / "edited.json").write_text(base.read_text().replace("10.0", "11.0"), encoding="utf-8")
    assert "edited" in refusal(["compare", files / "edited.json", base], capsys)
    (files / "old.json").write_text('{"format": 1, "rows": []}', encoding="utf-8")
    assert "schema version None" in refusal(["record", "check", files / "old.json"], capsys)


def test_a_record_is_checked_and_marked(files, capsys):
    stale = files / "stale.json"
    save(a_record(kernels=Kernels(digest="0" * 64, files={"append.cu": "0" * 64})), stale)
    assert main(["record", "check", str(files / "base.json")]) == 0
    assert main(["record", "check", str(files / "base.json"), str(stale)]) == 1
    assert "append.cu changed" in capsys.readouterr().out
    assert main(["record", "history", str(stale), "--because", "append writes twice now"]) == 0
    assert load(stale).history.because == "append writes twice now"
    assert load(stale).cases == a_record().cases
    assert main(["record", "check", str(stale)]) == 0
    assert "append writes twice" in capsys.readouterr().out.splitlines()[-1]
    marked = load(stale).history.model_copy(update={"because": "a\x1b[2J\nb"})
    save(load(stale).model_copy(update={"history": marked}), files / "odd.json")
    assert main(["record", "check", str(files / "odd.json")]) == 0
    assert capsys.readouterr().out.endswith(": a?[2J?b\n")
    assert "history already" in refusal(["record", "history", stale, "--because", "again"], capsys)
    assert "empty" in refusal(["record", "history", files / "base.json", "--because", " "], capsys)


def test_a_table_of_attention(files, capsys):
    assert main(["record", "table", str(files / "base.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "| case | heads | dims | floor µs | attend + combine µs | whole step µs | ratio | error |"
    )
    assert lines[2] == "| 1 x 4,096 | 16 | 576/512 | 1.0 | 10.0 | 16.0 | 10.00 | 1.7e-03 |"
    assert lines[3] == "| 2 x 4,096 | 16 | 576/512 |  |  |  |  | no memory |"
    assert len({line.count("|") for line in lines}) == 1
    assert "matches no case" in refusal(["record", "table", files / "base.json", "--only", "x*"], capsys)


def test_a_table_of_nothing_but_failures_says_why():
    lines = table(a_record(cases=a_record().cases[1:])).splitlines()
    assert lines[0] == "| case | heads | dims | floor µs | ratio | error |"
    assert lines[2] == "| 2 x 4,096 | 16 | 576/512 |  |  | no memory |"


def test_a_table_of_attention_holds_the_peers_of_the_same_run():
    rows = (PeerRow(peer="sdpa", series=(samples(20.0),)), PeerRow(peer="flex", failed="not installed"))
    ours, failed = a_record().cases
    lines = table(a_record(cases=(ours.model_copy(update={"peers": rows}), failed))).splitlines()
    assert lines[0].endswith("| whole step µs | torch SDPA µs | ratio | error |")
    assert lines[2] == "| 1 x 4,096 | 16 | 576/512 | 1.0 | 10.0 | 16.0 | 20.0 | 10.00 | 1.7e-03 |"
    assert lines[3] == "| 2 x 4,096 | 16 | 576/512 |  |  |  |  |  | no memory |"


def test_a_table_of_whole_stacks():
    ours, failed = a_record().cases
    ours = ours.model_copy(update={"parameters": {"layers": 8}})
    memory = Memory(cache_bytes=2_340_000_000, workspace_bytes=17_590_000, run_allocations=0)
    lines = table(a_record(cases=(ours.model_copy(update={"memory": memory}), failed))).splitlines()
    assert lines[0].startswith("| case | floor µs | whole step µs | a layer µs | ratio | error | caches GB |")
    assert lines[2] == "| 1 x 4,096 | 1.0 | 16.0 | 2.0 | 10.00 | 1.7e-03 | 2.3 | 17.6 | 0 |"
    assert lines[3] == "| 2 x 4,096 |  |  |  |  |  |  |  | failed: no memory |"
    layers = [figure.value for figure in figures(a_record(cases=(ours,))) if "a layer" in figure.source]
    assert 2.0 in layers


def test_tables_of_peers_of_sizes_and_of_calls():
    peers = Case(
        id="latent/b1", title="1 x 4,096", group="decode", shape=SHAPE,
        work=Work(bytes=4_000_000, operations=1),
        peers=(PeerRow(peer="one", series=(samples(20.0, timing="eager"), samples(8.0))),
               PeerRow(peer="two", failed="not installed")),
    )  # fmt: skip
    assert table(a_record(cases=(peers,))).splitlines()[2] == "| 1 x 4,096 | 1.0 | 8.0 | 8.00 |"
    growth = plain("kv/growth/a", 40.0, context=512, pool=10_241)
    calls = plain("kv/call", *([50.0] * 99), 3000.0, aim_median_us=60.0)
    broken = Case(id="kv/broken", title="Broken", group="kv", failed="why")
    record = a_record(cases=(growth, calls, broken), kind="cpu", ceilings=(), kernels=None)
    assert table(record, "kv/growth/*").splitlines()[2] == "| 512 | 10,241 | 40.0 µs |"
    lines = table(record, "kv/[!g]*").splitlines()
    assert lines[2].startswith("| Kv/Call | 50.0 µs | 50.0 µs … 50.0 µs | 79.5 µs | 60 µs | 100 |")
    assert "failed: why" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
    with pytest.raises(RecordError):
        table(record, "nothing")
    odd = plain("kv/odd", 40.0).model_copy(update={"title": "a | b\nc"})
    assert "a \\| b?c" in table(a_record(cases=(odd,), ceilings=(), kernels=None))


def test_a_record_backs_what_follows_from_it_and_nothing_else():
    found = list(figures(a_record()))

    def backs(kind, value):
        return any(one.kind == kind and one.value == pytest.approx(value, rel=1e-9) for one in found)

    assert backs("time", 10.0)
    assert backs("time", 6.0)  # the step without its attention
    assert backs("time", 1.0)  # the floor
    assert backs("ratio", 10.0)
    assert backs("rate", 4e11)
    assert backs("operations", 8e14)
    assert not backs("time", 11.0)
    assert not backs("rate", 10.0)
