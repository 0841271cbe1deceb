"""The audit: where nodes hide, what it prints, its exit status, and files that are not what they seem."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from paged_schema import InvalidArgument, PagedAttentionAttributes, PagedAttentionInputs, check
from paged_schema.audit import Settings, audit, audit_model
from paged_schema.cli import main
from paged_schema.errors import UnreadableModel
from paged_schema.onnx import attributes_of, inputs_of, make_model, make_node
from paged_schema.reader import read_model
from paged_schema.testing import bases


def model(**changes: object) -> onnx.ModelProto:
    attributes, inputs = bases.latent()
    for name, value in changes.items():
        (attributes if name in PagedAttentionAttributes.model_fields else inputs)[name] = value
    call = check(PagedAttentionAttributes(**attributes), PagedAttentionInputs(**inputs))
    return make_model(call)


def broken() -> onnx.ModelProto:
    made = model()
    for attribute in made.graph.node[0].attribute:
        if attribute.name == "scale":
            attribute.f = 0.0
    return made


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    return path


def test_a_made_model_is_what_onnx_accepts_and_audits_as_valid(saved: Path) -> None:
    onnx.checker.check_model(onnx.load(saved))
    (finding,) = audit(saved)
    assert (finding.verdict, finding.error, finding.undeclared) == ("valid", None, ())
    assert finding.call is not None
    # The file holds the scale as float32, which is what a call resolves it to.
    assert replace(finding.call, attributes=_latent()[0]) == check(*_latent())


def _latent() -> tuple[PagedAttentionAttributes, PagedAttentionInputs]:
    attributes, inputs = bases.latent()
    return PagedAttentionAttributes(**attributes), PagedAttentionInputs(**inputs)


def test_a_rejection_names_stage_rule_and_change() -> None:
    (finding,) = audit_model(broken(), Settings())
    assert finding.verdict == "rejected"
    assert finding.error is not None
    assert (finding.error.stage, finding.error.rule, finding.error.subject) == ("run", "R06c", "scale")


@pytest.mark.parametrize(
    ("settings_", "verdict"),
    [
        (Settings(), "valid"),
        (Settings(provider="paged-cuda"), "valid"),
        (Settings(provider="cpu"), "not implemented"),
        (Settings(provider="webgpu"), "not implemented"),
        (Settings(ort="1.29"), "valid"),
        (Settings(bind={"nothing": 3}), "valid"),
    ],
)
def test_settings(settings_: Settings, verdict: str) -> None:
    assert [finding.verdict for finding in audit_model(model(), settings_)] == [verdict]


@pytest.mark.parametrize(("size", "verdict"), [(2, "valid"), (3, "rejected")])
def test_bound_symbols_are_judged_as_sizes(size: int, verdict: str) -> None:
    made = model(past_seqlens="i32[batch]", block_table="i32[batch, 2]", cumulative_sequence_length="i32[3]")
    assert audit_model(made, Settings())[0].verdict == "valid"
    assert audit_model(made, Settings(bind={"batch": size}))[0].verdict == verdict
    longer = model(past_seqlens="i32[2]", cumulative_sequence_length="i32[batch + 1]")
    assert audit_model(longer, Settings(bind={"batch": size}))[0].verdict == verdict


def test_a_node_in_a_subgraph_sees_the_outer_types() -> None:
    made = model()
    branch = helper.make_graph([made.graph.node[0]], "branch", [], list(made.graph.output))
    condition = helper.make_tensor_value_info("condition", TensorProto.BOOL, [])
    node = helper.make_node("If", ["condition"], ["a", "b"], "choose", then_branch=branch, else_branch=branch)
    outputs = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, None) for name in ("a", "b")]
    graph = helper.make_graph([node], "outer", [condition, *made.graph.input], outputs)
    findings = audit_model(helper.make_model(graph, opset_imports=made.opset_import), Settings())
    assert [finding.path for finding in findings] == ["graph/choose.else_branch", "graph/choose.then_branch"]
    assert [(finding.verdict, finding.undeclared) for finding in findings] == [("valid", ())] * 2


def function_model(scale: float) -> onnx.ModelProto:
    made = model()
    inner = made.graph.node[0]
    for attribute in inner.attribute:
        if attribute.name == "scale":
            attribute.ClearField("f")
            attribute.ref_attr_name = "multiplier"
    names = [name for name in inner.input if name]
    function = helper.make_function(
        "local", "Attend", names, list(inner.output), [inner], made.opset_import, ["multiplier"]
    )
    caller = helper.make_node("Attend", names, list(inner.output), "layer0", domain="local", multiplier=scale)
    graph = helper.make_graph([caller], "outer", made.graph.input, made.graph.output)
    imports = [*made.opset_import, helper.make_opsetid("local", 1)]
    return helper.make_model(graph, functions=[function], opset_imports=imports)


def test_a_node_in_a_function_gets_the_types_and_values_of_each_call() -> None:
    (finding,) = audit_model(function_model(0.5), Settings())
    assert (finding.verdict, finding.path) == ("valid", "graph/layer0:local::Attend")
    assert finding.call is not None
    assert finding.call.scale == 0.5
    assert audit_model(function_model(0.0), Settings())[0].error is not None
    uncalled = function_model(0.5)
    del uncalled.graph.node[:]
    (finding,) = audit_model(uncalled, Settings())
    assert finding.path == "function:local::Attend"


def test_initializers_give_types_and_their_data_is_not_needed(tmp_path: Path) -> None:
    made = model(cos_cache="bf16[2048, 32]", sin_cache="bf16[2048, 32]")
    for info in [info for info in made.graph.input if info.name in ("cos_cache", "sin_cache")]:
        made.graph.input.remove(info)
    for name in ("cos_cache", "sin_cache"):
        tensor = TensorProto(
            name=name, data_type=TensorProto.BFLOAT16, dims=[2048, 32], raw_data=bytes(131072)
        )
        made.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    onnx.save(made, path)
    (finding,) = audit(path)
    assert (finding.verdict, finding.undeclared) == ("valid", ())
    assert read_model(path).ByteSize() < 4096


def test_types_that_are_not_declared_are_inferred_or_named() -> None:
    made = model()
    info = next(info for info in made.graph.input if info.name == "query")
    info.name = "raw"
    made.graph.node.insert(0, helper.make_node("Identity", ["raw"], ["query"]))
    assert audit_model(made, Settings())[0].undeclared == ()
    made.graph.node[0].domain = "unknown"
    assert audit_model(made, Settings())[0].undeclared == ("query",)


def test_external_data_is_never_opened(tmp_path: Path) -> None:
    made = model()
    tensor = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[1 << 30])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="does-not-exist.bin")
    made.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())
    assert audit(path)[0].verdict == "valid"


def test_a_gigabyte_of_inline_weights_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    path = tmp_path / "big.onnx"
    size = 1 << 30
    raw = b"\x4a" + _varint(size)  # raw_data
    tensor = b"\x08\x04\x10\x01\x42\x01w" + raw
    initializer = b"\x2a" + _varint(len(tensor) + size) + tensor  # initializer
    graph = model().graph.SerializeToString()
    with path.open("wb") as file:
        file.write(b"\x3a" + _varint(len(graph) + len(initializer) + size) + graph + initializer)
        file.truncate(file.tell() + size)  # a hole: the gigabyte is never written
    # VmHWM and not ru_maxrss: the latter starts at what the parent had, which is a lot after other tests.
    script = (
        "import sys; from paged_schema.cli import main; code = main(['audit', sys.argv[1]]);"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout.split()[-1]) < 300 * 1024


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",
        b"not a model at all",
        b"\xff" * 64,
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x08\x0a",
        b"\x0b\x0c",
        b"\x3a" + _varint(1 << 40),
    ],
)
def test_what_is_no_model_is_one_line_and_status_2(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert main(["audit", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: F01")
    assert error.count("\n") == 1


def test_nested_and_numerous_messages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    message = b""
    for _ in range(40):
        message = b"\x32" + _varint(len(message)) + message  # an attribute's graph …
        message = b"\x2a" + _varint(len(message)) + message  # … in a node's attribute …
        message = b"\x0a" + _varint(len(message)) + message + b"\x12\x00" * 2000  # … in a graph's node
    path.write_bytes(b"\x3a" + _varint(len(message)) + message)
    with pytest.raises(UnreadableModel):
        read_model(path)
    path.write_bytes(b"\x08\x01" * 2_000_001)
    with pytest.raises(UnreadableModel, match="fields"):
        read_model(path)
    node = b"\x0a" + _varint(2000) + b"\x2a\x00" * 1000  # a thousand empty attributes
    path.write_bytes(b"\x3a" + _varint(len(node) * 6000) + node * 6000)
    with pytest.raises(UnreadableModel, match="fields"):
        read_model(path)
    graph = b"\x12" + _varint(60 << 20) + bytes(60 << 20)
    path.write_bytes(b"\x3a" + _varint(len(graph)) + graph)
    with pytest.raises(UnreadableModel, match="MiB"):
        read_model(path)


def test_folders_and_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert main(["audit", str(tmp_path / "missing.onnx")]) == 2
    assert capsys.readouterr().err.count("error: F01") == 2


VALID = model().SerializeToString()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=24), st.booleans())
def test_any_damage_gives_a_verdict_or_a_clean_error(at: int, junk: bytes, cut: bool) -> None:
    import tempfile

    damaged = VALID[:at] + junk + (b"" if cut else VALID[at + len(junk) :])
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        Path(file.name).write_bytes(damaged)
        try:
            findings = audit(Path(file.name))
        except UnreadableModel as error:
            assert error.rule == "F01"  # noqa: PT017 - both ways are fine, and this one has a rule
        else:
            assert all(finding.verdict in ("valid", "rejected", "not implemented") for finding in findings)


def test_table(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["node", "where", "verdict", "stage", "rule", "what"]
    assert lines[1].split()[:3] == ["paged_attention", "graph", "valid"]
    assert "latent, 4/1 heads of 192" in lines[1]


def test_exit_status_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(broken(), path)
    assert main(["audit", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == str(path)
    (node,) = found["nodes"]
    assert (node["verdict"], node["rule"], node["stage"], node["subject"]) == (
        "rejected",
        "R06c",
        "run",
        "scale",
    )
    assert main(["audit", str(path), "--provider", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["nodes"][0]["modes"] == ["provider: cpu"]


def test_sarif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(broken(), path)
    assert main(["audit", str(path), "--sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("R06c", "error")
    assert result["ruleId"] in {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == path.as_posix()


def test_a_model_without_the_operator_has_nothing_to_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = model()
    made.graph.node[0].domain = "another"
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())
    assert main(["audit", str(path)]) == 0
    assert "no com.microsoft::PagedAttention node" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bind", ["batch", "=3", "batch=", "batch=-1", "batch=x", "batch=\u0663", "batch=" + "9" * 30]
)
def test_a_binding_that_makes_no_sense(bind: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(saved), "--bind", bind]) == 2
    assert "A05" in capsys.readouterr().err


def test_an_unknown_version_is_status_2(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(saved), "--ort", "1.28"]) == 2
    assert "A03" in capsys.readouterr().err


def test_the_module_runs(saved: Path) -> None:
    command = [sys.executable, "-m", "paged_schema"]
    assert subprocess.run([*command, "audit", saved], capture_output=True, check=False).returncode == 0
    rules = subprocess.run(
        [*command, "rules", "--ort", "1.30"], capture_output=True, text=True, check=True
    ).stdout
    assert "R04b" in rules
    assert "R04g" not in rules
    schema = json.loads(
        subprocess.run([*command, "schema"], capture_output=True, text=True, check=True).stdout
    )
    assert schema["attributes"]["required"] == ["num_heads", "kv_num_heads"]
    listed = subprocess.run([*command, "rules", "--json"], capture_output=True, text=True, check=True).stdout
    assert {"id", "stage", "statement", "status", "versions", "anchor"} == set(json.loads(listed)[0])


def test_make_node_names_its_values() -> None:
    node = make_node(check(*_latent()), name="layer0", prefix="layers.0.")
    assert (node.op_type, node.domain, node.name) == ("PagedAttention", "com.microsoft", "layer0")
    assert node.input[0] == "layers.0.query"
    assert node.input[2] == ""
    assert list(node.output) == ["layers.0.output", "layers.0.key_cache_out"]


def test_models_from_a_node() -> None:
    made = model()
    node = made.graph.node[0]
    types = {info.name: info.type for info in made.graph.input}
    attributes, inputs = attributes_of(node), inputs_of(node, types)
    assert check(attributes, inputs) == audit_model(made, Settings())[0].call
    for name, rule in (("scale", "L02"), ("qk_output", "L03")):
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        for attribute in [attribute for attribute in changed.attribute if attribute.name == name]:
            changed.attribute.remove(attribute)
        changed.attribute.append(helper.make_attribute(name, 1))
        with pytest.raises(InvalidArgument, match=rule):
            attributes_of(changed)
    del node.attribute[:]
    with pytest.raises(InvalidArgument, match="L01"):
        attributes_of(node)


def with_functions(*functions: onnx.FunctionProto, calls: str) -> onnx.ModelProto:
    made = model()
    made.functions.extend(functions)
    made.opset_import.append(helper.make_opsetid("local", 1))
    node = made.graph.node[0]
    call = helper.make_node(calls, list(node.input), list(node.output), domain="local")
    del made.graph.node[:]
    made.graph.node.append(call)
    return made


def function(name: str, nodes: list[onnx.NodeProto], attributes: tuple[str, ...] = ()) -> onnx.FunctionProto:
    node = model().graph.node[0]
    opsets = [helper.make_opsetid(domain, 1) for domain in ("local", "com.microsoft")]
    return helper.make_function(
        "local", name, list(node.input), list(node.output), nodes, opsets, list(attributes)
    )


def branch(*nodes: onnx.NodeProto) -> onnx.NodeProto:
    graph = helper.make_graph(list(nodes), "then", [], [])
    return helper.make_node("If", ["condition"], [], then_branch=graph, else_branch=graph)


def test_a_recursion_through_a_subgraph_ends() -> None:
    inner = model().graph.node[0]
    again = helper.make_node("F", list(inner.input), list(inner.output), domain="local")
    made = with_functions(function("F", [branch(inner, again)]), calls="F")
    assert [finding.verdict for finding in audit_model(made, Settings())] == ["valid", "valid"]


def test_a_subgraph_of_a_function_gets_the_values_of_the_call() -> None:
    inner = model().graph.node[0]
    for attribute in inner.attribute:
        if attribute.name == "scale":
            attribute.ClearField("f")
            attribute.ref_attr_name = "factor"
    made = with_functions(function("F", [branch(inner)], ("factor",)), calls="F")
    made.graph.node[0].attribute.append(helper.make_attribute("factor", 0.5))
    found = audit_model(made, Settings())
    assert [finding.call.scale for finding in found if finding.call] == [0.5, 0.5]


def test_functions_may_nest_deeply_but_not_multiply_without_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = model().graph.node[0]

    def level(depth: int, calls: int) -> onnx.FunctionProto:
        call = helper.make_node(f"F{depth + 1}", list(inner.input), list(inner.output), domain="local")
        return function(f"F{depth}", [call] * calls)

    chain = [level(depth, 1) for depth in range(20)] + [function("F20", [inner])]
    (finding,) = audit_model(with_functions(*chain, calls="F0"), Settings())
    assert finding.verdict == "valid"
    bomb = [level(depth, 12) for depth in range(8)] + [function("F8", [inner])]
    path = tmp_path / "bomb.onnx"
    path.write_bytes(with_functions(*bomb, calls="F0").SerializeToString())
    assert main(["audit", str(path)]) == 2
    assert "function calls" in capsys.readouterr().err


def test_a_name_can_break_neither_the_table_nor_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = model()
    made.graph.node[0].name = "a\nb\x1b[2Jc\u202ed"
    path = tmp_path / "model.onnx"
    onnx.save(made, path)
    assert main(["audit", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("a\\nb\\x1b[2Jc\\u202ed ")


def test_sarif_locations_are_uris(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my model#1.onnx"
    onnx.save(broken(), path)
    assert main(["audit", str(path), "--sarif"]) == 1
    (result,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri.endswith("/my%20model%231.onnx")


def test_a_made_model_lists_no_cache_output_that_ort_would_refuse() -> None:
    made = model(key_cache="bf16")
    assert list(made.graph.node[0].output) == ["output"]
    (finding,) = audit_model(made, Settings())
    assert finding.verdict == "valid"
