"""Whole models with PagedAttention nodes in ONNX's reference evaluator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from paged_oracle import paged_attention
from paged_oracle.dtypes import name_of
from paged_oracle.onnx import PagedAttention, evaluator, operator
from paged_oracle.testing import Case, make_case
from paged_schema import INPUT_NAMES, InvalidArgument

TYPES = {
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float32": TensorProto.FLOAT,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
    "int32": TensorProto.INT32,
}


def model_of(
    case: Case, outputs: list[str], *, after: str | None = None, **attributes: float | int | str
) -> ModelProto:
    """A model of one node, its inputs those of the case, optionally with a second node on its output."""
    given = {k: v for k, v in case.attributes.model_dump().items() if k in case.attributes.model_fields_set}
    names = [name if name in case.inputs else "" for name in INPUT_NAMES]
    while not names[-1]:
        names.pop()
    node = helper.make_node(
        "PagedAttention", names, outputs, domain="com.microsoft", **{**given, **attributes}
    )
    nodes = [node]
    if after:
        nodes.append(helper.make_node(after, [outputs[0]], ["final"]))
    values = [
        helper.make_tensor_value_info(name, TYPES[name_of(array.dtype)], array.shape)
        for name, array in case.inputs.items()
    ]
    cache = TYPES[name_of(case.inputs["key_cache"].dtype)]
    element = TYPES[name_of(case.inputs["query"].dtype)]
    results = [
        helper.make_tensor_value_info(name, element if name in ("output", "final") else cache, None)
        for name in [*outputs, *(["final"] if after else [])]
        if name
    ]
    graph = helper.make_graph(nodes, "test", values, results)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(
    "case",
    [
        make_case(new=[3, 1], past=[4, 20], num_heads=2, head_size=32, rotary_dim=16),
        make_case(new=[3, 1], past=[4, 20], num_heads=2, head_size=32, dtype="float16", cache_dtype="int8"),
        make_case(new=[2], past=[4], head_size=32, layout="SEPARATE", kv_num_heads=2, packed=True, norm=True),
        make_case(new=[2], past=[4], layout="SEPARATE", cache_dtype="uint8", per_channel=True, softcap=3.0),
        make_case(new=[2], past=[4], num_heads=2, head_size=32, cache_dtype="float8e4m3fn"),
    ],
    ids=["latent", "int8", "packed", "int4", "fp8"],
)
def test_a_model_computes_what_the_function_computes(case: Case) -> None:
    separate = case.attributes.kv_cache_layout == "SEPARATE"
    names = ["output", "key_cache_out", "value_cache_out"][: 3 if separate else 2]
    session = evaluator(model_of(case, names))
    feed = case.fresh()
    results = session.run(None, feed)
    expected = paged_attention(case.attributes, case.fresh())
    assert results[0].tobytes() == expected.output.tobytes()
    assert results[1] is feed["key_cache"]
    assert results[1].tobytes() == expected.key_cache.tobytes()
    if separate:
        assert results[2] is feed["value_cache"]


def test_the_cache_is_updated_even_without_a_cache_output() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32)
    feed = case.fresh()
    evaluator(model_of(case, ["output"])).run(None, feed)
    assert feed["key_cache"].tobytes() == paged_attention(case.attributes, case.fresh()).key_cache.tobytes()


def test_empty_output_names_stay_empty() -> None:
    case = make_case(new=[3], past=[4], head_size=32, layout="SEPARATE", dtype="float16")
    model = model_of(case, ["output", "", "value_cache_out"], after="Abs")
    feed = case.fresh()
    output, values, final = evaluator(model).run(None, feed)
    np.testing.assert_array_equal(final, np.abs(output))
    assert values is feed["value_cache"]


def test_two_steps_share_a_cache() -> None:
    case = make_case(new=[5], past=[4], num_heads=2, head_size=32)
    whole = paged_attention(case.attributes, case.fresh())
    session = evaluator(model_of(case, ["output", "key_cache_out"]))
    feed, rows = case.fresh(), []
    cache = feed["key_cache"]
    for start, stop in ((0, 3), (3, 5)):
        step = feed | {name: feed[name][start:stop] for name in ("query", "key")}
        step["cumulative_sequence_length"] = np.array([0, stop - start], np.int32)
        step["past_seqlens"] = feed["past_seqlens"] + np.int32(start)
        output, cache = session.run(None, step | {"key_cache": cache})
        rows.append(output)
    assert np.concatenate(rows).tobytes() == whole.output.tobytes()


@pytest.mark.parametrize(
    ("outputs", "attributes", "rule"),
    [
        (["output", "key_cache_out", "value_cache_out"], {}, "L18"),
        (["output"], {"kv_cache_layout": "latent"}, "L11"),
        (["output"], {"smooth_softmax": 1}, "L03"),
        (["output"], {"num_heads": 2.0}, "L02"),
        (["output"], {"qk_norm_epsilon": 0.0}, "C03"),
    ],
)
def test_a_model_that_onnx_runtime_refuses_is_refused_when_loaded(
    outputs: list[str], attributes: dict[str, float | int | str], rule: str
) -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32)
    with pytest.raises(InvalidArgument) as caught:
        evaluator(model_of(case, outputs, **attributes))
    assert caught.value.rule == rule


def test_a_model_that_onnx_runtime_loads_and_refuses_to_run() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32)
    session = evaluator(model_of(case, ["output"], num_heads=5))
    with pytest.raises(InvalidArgument) as caught:
        session.run(None, case.fresh())
    assert (caught.value.stage, caught.value.rule) == ("run", "R03d")


def branching(case: Case, **attributes: float | int | str) -> ModelProto:
    """The node in one branch of an If whose condition is the input `taken`; the other returns the query."""
    model = model_of(case, ["output"], **attributes)
    result = model.graph.output[0]
    attend = helper.make_graph(list(model.graph.node), "attend", [], [result])
    other = helper.make_node("Identity", ["query"], ["same"])
    same = helper.make_tensor_value_info("same", TensorProto.FLOAT16, None)
    skip = helper.make_graph([other], "skip", [], [same])
    node = helper.make_node("If", ["taken"], ["final"], then_branch=attend, else_branch=skip)
    values = [*model.graph.input, helper.make_tensor_value_info("taken", TensorProto.BOOL, [])]
    final = helper.make_tensor_value_info("final", TensorProto.FLOAT16, None)
    graph = helper.make_graph([node], "branching", values, [final])
    return helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=10)


def test_a_node_in_a_subgraph_runs_and_is_checked_when_loaded() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32, dtype="float16")
    feed = case.fresh() | {"taken": np.array(True)}
    expected = paged_attention(case.attributes, case.fresh())
    assert evaluator(branching(case)).run(None, feed)[0].tobytes() == expected.output.tobytes()
    assert feed["key_cache"].tobytes() == expected.key_cache.tobytes()
    with pytest.raises(InvalidArgument) as caught:
        evaluator(branching(case, kv_cache_layout="latent"))
    assert caught.value.rule == "L11"


def test_nodes_in_a_row_may_leave_types_undeclared() -> None:
    """The second takes the output of a MatMul and the cache output of the first."""
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32, dtype="float16")
    model = model_of(case, ["output", "key_cache_out"])
    first = model.graph.node[0]
    renamed = {"query": "mixed", "key_cache": "key_cache_out"}
    names = [renamed.get(name, name) for name in first.input]
    second = helper.make_node("PagedAttention", names, ["final", "cache"], domain="com.microsoft")
    second.attribute.extend(first.attribute)
    product = helper.make_node("MatMul", ["output", "weight"], ["mixed"])
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    constant = numpy_helper.from_array(weight, "weight")
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in ("final", "cache")]
    graph = helper.make_graph(
        [first, product, second],
        "row",
        model.graph.input,
        results,
        [constant],
    )
    session = evaluator(helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=10))
    feed = case.fresh()
    final, cache = session.run(None, feed)
    by_hand = case.fresh()
    by_hand["query"] = paged_attention(case.attributes, by_hand).output @ weight
    expected = paged_attention(case.attributes, by_hand)
    assert final.tobytes() == expected.output.tobytes()
    assert cache is feed["key_cache"]
    feed["query"] = feed["query"].astype(np.float32)
    with pytest.raises(InvalidArgument) as caught:
        session.run(None, feed)
    assert caught.value.rule == "L07"


def test_an_initializer_serves_as_an_input() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32)
    model = model_of(case, ["output", "key_cache_out"])
    table = case.inputs["block_table"]
    model.graph.initializer.append(numpy_helper.from_array(table, "block_table"))
    kept = [value for value in model.graph.input if value.name != "block_table"]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    feed = case.fresh()
    del feed["block_table"]
    expected = paged_attention(case.attributes, case.fresh())
    assert evaluator(model).run(None, feed)[0].tobytes() == expected.output.tobytes()


def test_shapes_of_the_feed_are_checked_when_run() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32)
    feed = case.fresh()
    session = evaluator(model_of(case, ["output"]))
    feed["past_seqlens"] = np.array([4, 4], np.int32)
    with pytest.raises(InvalidArgument) as caught:
        session.run(None, feed)
    assert caught.value.rule == "R09b"
    assert feed["key_cache"].tobytes() == case.inputs["key_cache"].tobytes()


def test_options_reach_the_operator() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32, dtype="float32", rotary_dim=16)
    model = model_of(case, ["output"])
    with pytest.raises(InvalidArgument):
        evaluator(model)
    session = evaluator(model, rounding="exact", extensions=case.extensions, strict=True)
    expected = paged_attention(case.attributes, case.fresh(), rounding="exact", extensions=case.extensions)
    assert session.run(None, case.fresh())[0].tobytes() == expected.output.tobytes()


def test_the_class_works_with_the_plain_evaluator() -> None:
    from onnx.reference import ReferenceEvaluator

    case = make_case(new=[3], past=[4], num_heads=2, head_size=32)
    model = model_of(case, ["output"])
    expected = paged_attention(case.attributes, case.fresh()).output
    for own in (PagedAttention, operator(ort="1.32")):
        assert (
            ReferenceEvaluator(model, new_ops=[own]).run(None, case.fresh())[0].tobytes()
            == expected.tobytes()
        )


def test_a_function_may_pass_attributes_on() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32)
    model = model_of(case, ["output"])
    node = model.graph.node[0]
    given = {attribute.name: attribute for attribute in node.attribute}
    inner = helper.make_node("PagedAttention", node.input, node.output, domain="com.microsoft")
    for name, attribute in given.items():
        linked = inner.attribute.add()
        linked.name, linked.type, linked.ref_attr_name = name, attribute.type, name
    body = helper.make_function(
        "local", "Attend", list(node.input), ["output"], [inner], list(model.opset_import), list(given)
    )
    outer = helper.make_node("Attend", node.input, node.output, domain="local")
    outer.attribute.extend(given.values())
    del model.graph.node[:]
    model.graph.node.append(outer)
    model.functions.append(body)
    model.opset_import.append(helper.make_opsetid("local", 1))
    expected = paged_attention(case.attributes, case.fresh()).output
    assert evaluator(model).run(None, case.fresh())[0].tobytes() == expected.tobytes()
