"""Records: what is written is read again, and whatever else is refused with the reason."""

import json
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_bench.errors import RecordError
from paged_bench.record import (
    Case,
    Ceiling,
    Environment,
    History,
    Kernels,
    PeerRow,
    Record,
    Samples,
    Shape,
    Suite,
    Variant,
    Work,
    capture,
    dump,
    finish,
    load,
    marked_history,
    package_digest,
    parse,
    present_kernels,
    revision,
    save,
    stale_kernels,
)
from pydantic import ValidationError

ENVIRONMENT = Environment(python="3.12.1", system="Linux", cpu="a processor", cores=2)
SHAPE = Shape(
    layout="LATENT", dtype="bfloat16", cache_dtype="bfloat16", heads=16, head_size=576, v_head_size=512,
    block_size=64, batch=128, context=4096.0,
)  # fmt: skip


def a_record(*values, **fields):
    times = values or (10.0, 11.0, 12.5)
    case = Case(
        id="latent/b1",
        title="one row",
        group="decode",
        shape=SHAPE,
        work=Work(bytes=1000, operations=5000),
        series=(Samples(what="attend+combine", timing="graph", values=times),),
    )
    ceilings = (
        Ceiling(what="read", value=1e9, method="a sum"),
        Ceiling(what="matmul", value=1e9, dtype="bfloat16", method="a product"),
    )
    filled = {
        "kind": "gpu", "what": "a test", "created": "2026-11-29T10:00:00+00:00", "suite": Suite(name="quick"),
        "environment": ENVIRONMENT, "ceilings": ceilings, "cases": (case,),
    }  # fmt: skip
    return Record(**(filled | fields))


def refusal(data):
    with pytest.raises(RecordError) as caught:
        parse(data if isinstance(data, bytes) else data.encode(), "some.json")
    assert "some.json" in str(caught.value)
    return str(caught.value)


def test_what_is_saved_is_loaded_and_saved_again_bit_for_bit(tmp_path):
    record = a_record(history=History(because="older [ 1, 2 ] kernels", since="2026-11-29"))
    save(record, tmp_path / "new" / "a.json")
    assert load(tmp_path / "new" / "a.json") == record
    assert dump(load(tmp_path / "new" / "a.json")) == (tmp_path / "new" / "a.json").read_text()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=8),
    text=st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
    number=st.one_of(st.integers(-9, 9), st.floats(-1e9, 1e9), st.booleans(), st.text(string.printable)),
)
def test_any_values_and_texts_survive(values, text, number):
    case = Case(
        id="a", title=text, group="cpu", parameters={"p": number},
        series=(Samples(what="call", timing="wall", values=tuple(values), blocks=(len(values),)),),
    )  # fmt: skip
    record = a_record(cases=(case,), ceilings=())
    again = parse(dump(record).encode(), "x")
    assert again == record
    assert type(again.cases[0].parameters["p"]) is type(number)


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 10_000))
def test_a_truncated_record_is_refused(cut):
    text = dump(a_record()).rstrip()
    message = refusal(text[: cut % len(text)])
    assert "truncated" in message or "no JSON" in message


@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, 10_000), digit=st.sampled_from(string.digits))
def test_a_changed_digit_is_refused(place, digit):
    text = dump(a_record())
    digits = [index for index, letter in enumerate(text) if letter in string.digits]
    index = digits[place % len(digits)]
    if text[index] == digit:
        return
    message = refusal(text[:index] + digit + text[index + 1 :])
    assert any(word in message for word in ("digest", "schema version", "no JSON"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content | {"schema_version": 2}, "schema version 2"),
        (lambda content: content | {"schema_version": True}, "schema version True"),
        (lambda content: {key: content[key] for key in content if key != "schema_version"}, "version None"),
        (lambda content: {key: content[key] for key in content if key != "digest"}, "its digest is None"),
        (lambda content: content | {"cases": []}, "edited"),
        (lambda content: content | {"extra": 1}, "edited"),
    ],
)
def test_another_version_and_an_edit_are_refused_with_the_reason(change, reason):
    content = json.loads(dump(a_record()))
    assert reason in refusal(json.dumps(change(content)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"3",
        b"\xff\xfe",
        b"nonsense",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_record_is_refused(data):
    assert "some.json" in refusal(data)


def test_layout_and_key_order_are_free():
    content = json.loads(dump(a_record()))
    turned = json.dumps(dict(reversed(content.items())), indent=7)
    assert parse(turned.encode(), "x") == a_record()


def test_a_failed_write_keeps_the_old_record(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    save(a_record(), path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="no space"):
        save(a_record(99.0), path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_medians_floors_and_ratios_come_from_the_samples():
    record = a_record()
    case = record.cases[0]
    assert case.samples().median == 11.0
    assert case.samples().quartiles == (10.5, 11.75)
    assert record.floor_us(case) == pytest.approx(5.0)
    assert record.ratio_to_floor(case) == pytest.approx(2.2)
    assert a_record(ceilings=()).floor_us(case) is None
    assert case.samples("step") is None
    assert record.case("latent/b1") is case
    assert record.case("other") is None


def test_blocks_cut_the_values():
    samples = Samples(what="call", timing="wall", values=(1.0, 2.0, 3.0), blocks=(1, 2))
    assert samples.in_blocks() == ((1.0,), (2.0, 3.0))
    assert Samples(what="call", timing="wall", values=(1.0, 2.0)).in_blocks() == ((1.0, 2.0),)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Samples(what="call", timing="wall"),
        lambda: Samples(what="call", timing="wall", values=(1.0,), median_us=1.0),
        lambda: Samples(what="call", timing="wall", values=(1.0,), blocks=(2,)),
        lambda: Samples(what="call", timing="wall", values=(0.0,)),
        lambda: Samples(what="call", timing="wall", values=(float("inf"),)),
        lambda: PeerRow(peer="x"),
        lambda: Case(id="a", title="t", group="g"),
        lambda: Case(id="A b", title="t", group="g", failed="why"),
        lambda: a_record(cases=(a_record().cases[0],) * 2),
        lambda: a_record(created="yesterday"),
    ],
)
def test_a_record_that_contradicts_itself_cannot_be_made(make):
    with pytest.raises(ValidationError):
        make()


def test_only_the_kernels_that_ran_make_a_record_stale():
    now = present_kernels()
    assert now.files
    other = dict.fromkeys(now.files, "0" * 64)
    one = next(iter(now.files))
    assert stale_kernels(a_record()) == ()
    assert stale_kernels(a_record(kernels=now)) == ()
    assert stale_kernels(a_record(kernels=Kernels(digest="0" * 64))) == ("the kernel sources",)
    assert stale_kernels(a_record(kernels=Kernels(digest="0" * 64, files=now.files))) == ()
    mixed = Kernels(digest="0" * 64, files=dict(now.files) | {one: "0" * 64, "gone.cu": "0" * 64})
    assert stale_kernels(a_record(kernels=mixed)) == (one, "gone.cu")
    ran = a_record().cases[0].model_copy(update={"variants": (Variant(kernel=list(now.files)[-1]),)})
    assert stale_kernels(a_record(kernels=mixed, cases=(ran,))) == ()
    assert set(present_kernels([one]).files) == {one}
    assert set(stale_kernels(a_record(kernels=Kernels(digest="0" * 64, files=other)))) == set(other)


def test_history_is_marked_once_and_with_a_reason():
    record = marked_history(a_record(), " the kernels changed ")
    assert record.history is not None
    assert record.history.because == "the kernels changed"
    for bad, because in ((record, "again"), (a_record(), " ")):
        with pytest.raises(RecordError):
            marked_history(bad, because)


def test_the_environment_names_the_machine_and_not_its_owner(tmp_path, monkeypatch):
    environment = finish(capture())
    text = environment.model_dump_json()
    assert environment.cores >= 1
    assert environment.packages["paged-bench"]
    import getpass
    import platform

    for private in (platform.node(), getpass.getuser(), str(tmp_path)):
        assert f'"{private}"' not in text
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert revision(tmp_path) is None


def test_a_package_digest_follows_its_sources():
    assert package_digest("paged_kv") == package_digest("paged_kv")
    assert package_digest("paged_kv") != package_digest("paged_schema")
    with pytest.raises(ModuleNotFoundError):
        package_digest("math")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="POSIX devices")
def test_what_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr("paged_bench.record.file._LARGEST", 1 << 20)
    with pytest.raises(RecordError, match="larger than 1 MiB"):
        load(Path("/dev/zero"))
