"""The pictures: the same bytes each time, whole SVG, and nothing said by colour alone."""

import itertools
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_bench.cli import main
from paged_bench.errors import RecordError
from paged_bench.record import (
    Case,
    Ceiling,
    Environment,
    Gpu,
    History,
    PeerRow,
    Record,
    Samples,
    Shape,
    Suite,
    Work,
    dump,
    save,
)
from paged_bench.report.axes import LogScale, around
from paged_bench.report.command import NARROW, PICTURES, WIDE, write
from paged_bench.report.data import OURS, points, splits, styles
from paged_bench.report.growth import growth
from paged_bench.report.latency import lines_over
from paged_bench.report.legend import legend_rows
from paged_bench.report.style import SERIES
from paged_bench.report.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"
SIZES = [(1, 4096), (1, 32_768), (64, 4096), (128, 4096)]


def series(us, what="attend+combine", timing="graph"):
    return Samples(what=what, timing=timing, values=(us * 0.99, us, us * 1.01))


def a_case(batch, context, us, peers=(), parts=True, **parameters):
    shape = Shape(
        layout="LATENT", dtype="bfloat16", cache_dtype="bfloat16", heads=16, head_size=576, v_head_size=512,
        block_size=64, batch=batch, context=float(context),
    )  # fmt: skip
    apart = [series(us / 8, what) for what in ("append", "schedule", "attend", "combine")] if parts else []
    return Case(
        id=f"latent/b{batch}/c{context}",
        title=f"{batch} x {context:,} <&>",
        group="decode",
        shape=shape,
        parameters=parameters,
        work=Work(bytes=batch * context * 1152, operations=2 * 16 * 1088 * batch * context),
        series=(series(us), series(us * 1.2, "step"), *apart),
        peers=tuple(PeerRow(peer=name, series=(series(value),)) for name, value in peers),
    )


def a_record(cases, **fields):
    ceilings = (
        Ceiling(what="read", value=4.4e12, method="a sum"),
        Ceiling(what="matmul", value=8e14, dtype="bfloat16", method="a product"),
    )
    gpu = Gpu(name="H200", compute_capability="9.0", multiprocessors=132, driver="13.0")
    environment = Environment(python="3.12", system="Linux", cpu="a processor", gpu=gpu)
    filled = {
        "kind": "gpu", "what": "A test.", "created": "2026-11-29T10:00:00Z", "suite": Suite(name="standard"),
        "environment": environment, "ceilings": ceilings, "cases": tuple(cases),
    }  # fmt: skip
    return Record(**(filled | fields))


def the_records():
    peers = [(f"peer {index}", 40.0 + index) for index in range(12)]
    growth = tuple(
        Case(id=f"g{context}-{pool}", title="step", group="g", parameters={"context": context, "pool": pool},
             series=(Samples(what="call", timing="wall", values=(40.0, 41.0)),))
        for context, pool in ((512, 1000), (2048, 4000), (512, 90_000))
    )  # fmt: skip
    ours = a_record([a_case(batch, context, batch * context / 3000, peers) for batch, context in SIZES])
    return [ours, a_record(growth, kind="cpu", ceilings=())]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write(the_records(), folder, ["a.json", "b.json"])
    return folder


def test_every_picture_is_drawn_in_two_widths(drawn):
    names = {f"{name}{suffix}.svg" for name in PICTURES for suffix in ("", "-narrow")}
    assert {path.name for path in drawn.iterdir()} == names | {"report.html"}


def test_the_bytes_are_the_same_in_every_process(drawn, tmp_path):
    for index, record in enumerate(the_records()):
        save(record, tmp_path / f"{'ab'[index]}.json")
    for seed in ("1", "2"):
        words = [sys.executable, "-m", "paged_bench", "report", "a.json", "b.json", "--out", seed]
        environment = {"PYTHONHASHSEED": seed, "PATH": "", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
        subprocess.run(words, cwd=tmp_path, check=True, env=environment, stdout=subprocess.DEVNULL)
        for path in drawn.iterdir():
            assert (tmp_path / seed / path.name).read_bytes() == path.read_bytes()


def svgs(drawn):
    return {path.name: ElementTree.parse(path).getroot() for path in drawn.glob("*.svg")}


def test_every_drawing_stands_alone_and_says_what_it_is(drawn):
    for name, root in svgs(drawn).items():
        text = (drawn / name).read_text(encoding="utf-8")
        assert root.get("role") == "img"
        assert root.find(f"{SVG}title").text
        assert root.find(f"{SVG}desc").text
        assert "prefers-color-scheme:dark" in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|@import|url\((?!#)", text)
        width = float(root.get("width"))
        assert width == (NARROW if "narrow" in name else WIDE)


def test_nothing_leaves_the_drawing(drawn):
    for name, root in svgs(drawn).items():
        _, _, width, height = map(float, root.get("viewBox").split())
        for text in root.iter(f"{SVG}text"):
            size, x, y = (float(text.get(key)) for key in ("font-size", "x", "y"))
            assert 0 <= y <= height, (name, text.text)
            if text.get("transform") is None:
                length = text_width(text.text, size) * 0.9  # the estimate is wide
                left = x - {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
                assert left >= -1, (name, text.text)
                assert left + length <= width + 1, (name, text.text)


def test_a_cost_that_falls_stays_in_the_drawing():
    sizes = {512: 40.0, 2048: 10.0, 8192: 2.0}
    cases = [
        Case(id=f"g{size}", title="step", group="g", parameters={"context": size, "pool": 1000},
             series=(Samples(what="call", timing="wall", values=(us, us)),))
        for size, us in sizes.items()
    ]  # fmt: skip
    svg = growth([a_record(cases, kind="cpu", ceilings=())], WIDE)
    height = float(re.search(r'viewBox="0 0 \S+ (\S+)"', svg)[1])
    points = [
        line for line in re.findall(r'polyline class="l0" points="([^"]*)"', svg) if line.count(",") == 3
    ]
    assert points
    assert all(float(pair.split(",")[1]) < height - 50 for line in points for pair in line.split())
    assert ">0.0625<" in svg


def test_no_text_covers_another(drawn):
    for name, root in svgs(drawn).items():
        boxes = []
        for text in root.iter(f"{SVG}text"):
            if text.get("transform") is None and text.text:
                size, x, y = (float(text.get(key)) for key in ("font-size", "x", "y"))
                length = text_width(text.text, size) * 0.8  # the estimate is wide
                left = x - {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
                boxes.append((left, left + length, y - size * 0.7, y, text.text))
        for one, other in itertools.combinations(boxes, 2):
            beside = one[1] <= other[0] or other[1] <= one[0]
            above = one[3] <= other[2] or other[3] <= one[2]
            assert beside or above, (name, one, other)


def test_no_two_series_share_a_shape_or_a_dash(drawn):
    style = (drawn / "roofline.svg").read_text(encoding="utf-8")
    dashes = [
        re.search(rf"\.l{index}{{[^}}]*stroke-dasharray:([^}}]*)}}", style)[1] for index in range(SERIES)
    ]
    assert len(set(dashes)) == SERIES
    patterns = re.findall(r'<pattern id="p\d+"[^>]*>(.*?)</pattern>', style)
    assert len({re.sub(r"var\(--c\d\)", "", mark) for mark in patterns[:4]}) == 4
    # More implementations than styles: the styles come again, but never ours.
    many = styles([OURS, *(f"peer {index}" for index in range(SERIES + 3))])
    assert [many[f"peer {index}"] for index in (0, SERIES - 2, SERIES - 1)] == [1, SERIES - 1, 1]
    assert [name for name, series in many.items() if series == 0] == [OURS]
    # A known peer has its own style whoever else is there, and no stranger takes it.
    few = styles([OURS, "stranger", "FlashMLA"])
    assert few["FlashMLA"] == styles(["FlashMLA"])["FlashMLA"] != few["stranger"]


def test_the_heat_map_says_its_numbers(drawn):
    numbers = [text.text for text in svgs(drawn)["ratio-to-floor.svg"].iter(f"{SVG}text")]
    record = the_records()[0]
    for case in record.cases:
        assert f"{record.ratio_to_floor(case):.2f}" in numbers


def test_the_split_names_every_kernel_and_the_sum(drawn):
    text = (drawn / "step.svg").read_text(encoding="utf-8")
    for name in ("append", "schedule", "attend", "combine"):
        assert f">{name}</text>" in text
    assert [len(split.parts) for split in splits(the_records())] == [4, 4, 4, 4]
    case = a_case(1, 4096, 10.0)
    fewer = case.model_copy(update={"series": tuple(one for one in case.series if one.what != "attend")})
    assert [name for name, _ in splits([a_record([fewer])])[0].parts] == [
        "append",
        "schedule",
        "attend + combine",
    ]
    coarse = splits([a_record([a_case(1, 4096, 10.0, parts=False)])])[0]
    assert coarse.parts == (("append + schedule", pytest.approx(2.0)), ("attend + combine", 10.0))


def test_text_from_a_record_is_no_markup(drawn):
    page = (drawn / "report.html").read_text(encoding="utf-8")
    assert "<&>" not in page
    assert "&lt;&amp;&gt;" in page


def test_the_page_needs_no_network_and_no_script(drawn):
    page = (drawn / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=", page)
    assert "width=device-width" in page
    assert "prefers-color-scheme:dark" in page
    assert page.count("<figure>") == len(PICTURES)


def test_present_kernels_are_drawn_before_history():
    old = History(because="older kernels", since="2026-11-29")
    present, past = a_record([a_case(1, 4096, 10.0)]), a_record([a_case(1, 4096, 99.0)], history=old)
    assert [point.us for point in points([past, present])] == [10.0]
    only = points([past])
    assert [(point.us, point.history) for point in only] == [(99.0, True)]


@pytest.mark.parametrize("history", [None, History(because="older", since="2026-11-29")])
def test_of_two_runs_the_newer_one_is_drawn(history):
    older = a_record([a_case(1, 4096, 99.0), a_case(1, 32_768, 99.0)], history=history)
    newer = a_record(
        [a_case(1, 4096, 10.0), a_case(1, 32_768, 20.0)], history=history, created="2026-11-30T09:00:00Z"
    )
    for records in ([older, newer], [newer, older]):
        (panel,) = lines_over(points(records), "context")
        assert [us for _, us, _ in panel.lines[OURS]] == [10.0, 20.0]


def test_a_path_that_was_asked_for_is_not_drawn_as_the_operator_as_it_comes():
    forced = a_record([a_case(1, 4096, 99.0)], command="paged-bench run --suite standard --kernel sm80")
    chosen = a_record([a_case(1, 4096, 10.0)], command="paged-bench run --suite standard")
    assert [point.us for point in points([forced, chosen])] == [10.0]
    assert [split.step_us for split in splits([forced, chosen])] == [12.0]
    assert [point.us for point in points([forced])] == [99.0]


def test_the_backends_of_a_peer_are_one_implementation():
    names = ["torch SDPA (cudnn)", "torch SDPA (efficient)", "FA3 (vLLM)", "somebody (else)"]
    cases = [a_case(1, 4096 << index, 10.0, [(name, 20.0)]) for index, name in enumerate(names)]
    shown = [point.implementation for point in points([a_record(cases)])]
    assert shown == [OURS] * 4 + ["torch SDPA", "torch SDPA", "FA3 (vLLM)", "somebody (else)"]


def test_records_of_different_gpus_are_not_drawn_under_one_name(tmp_path):
    here, gpu = a_record([a_case(1, 4096, 10.0)]), a_record([]).environment.gpu
    environment = here.environment.model_copy(update={"gpu": gpu.model_copy(update={"name": "A100"})})
    there = here.model_copy(update={"environment": environment})
    with pytest.raises(RecordError, match="different GPUs: A100, H200"):
        write([here, there], tmp_path / "out", ["a", "b"])
    assert not (tmp_path / "out").exists()


def test_every_point_is_held_against_its_own_ceilings():
    slow = (Ceiling(what="read", value=1e12, method="m"), Ceiling(what="matmul", value=1e14, method="m"))
    peer = a_case(1, 4096, 10.0).model_copy(
        update={"series": (), "peers": (PeerRow(peer="other", series=(series(10.0),)),)}
    )
    found = points([a_record([a_case(1, 4096, 10.0)]), a_record([peer], ceilings=slow)])
    assert [point.implementation for point in found] == [OURS, "other"]
    assert found[0].floor_us * 4.4 == pytest.approx(found[1].floor_us)


def test_options_of_the_operator_are_not_mixed_with_it_as_it_comes():
    cases = [
        a_case(1, 4096, 10.0),
        a_case(1, 8192, 10.0, split_rows=1024),
        a_case(2, 4096, 9.0, weight_terms=2),
    ]
    assert [point.standard for point in points([a_record(cases)])] == [True, False, False]
    old = History(because="older kernels", since="2026-11-29")
    assert [point.standard for point in points([a_record(cases, history=old)])] == [True, False, True]


def test_nothing_to_draw_is_an_error_and_leaves_no_folder(tmp_path):
    empty = a_record([Case(id="a", title="a", group="g", failed="why")])
    with pytest.raises(RecordError, match="nothing that could be drawn"):
        write([empty], tmp_path / "out", ["a.json"])
    assert not (tmp_path / "out").exists()


def test_a_broken_record_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "a.json").write_text(dump(the_records()[0])[:-40], encoding="utf-8")
    assert main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 2
    assert "truncated" in capsys.readouterr().err


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=6), most=st.integers(2, 9))
def test_a_scale_holds_its_values_and_few_ticks(values, most):
    low, high = around(values)
    scale = LogScale(low, high, 10, 110)
    assert all(10 <= scale(value) <= 110 for value in values)
    assert len(scale.ticks(most)) <= most
    assert all(low * 0.99 <= tick <= high * 1.01 for tick in scale.ticks(most))


@settings(deadline=None, max_examples=50)
@given(names=st.lists(st.text("abcdefgh (3)", min_size=1, max_size=18), min_size=1, max_size=14))
def test_a_legend_loses_no_name(names):
    assert [name for row in legend_rows(names, 300) for name in row] == names
