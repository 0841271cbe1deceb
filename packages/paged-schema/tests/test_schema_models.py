"""The models: what they hold, how they read text, and that no other library's traceback reaches the user."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from paged_schema import (
    Capability,
    InvalidArgument,
    NotImplementedMode,
    PagedAttentionAttributes,
    PagedAttentionInputs,
    PagedAttentionOutputs,
    PagedSchemaError,
    TensorSpec,
    check,
    explain,
    require,
)
from paged_schema.attributes import KINDS
from paged_schema.capability import FEATURES
from paged_schema.dtypes import ALIASES, ONNX_NUMBER
from paged_schema.inputs import INPUT_NAMES
from paged_schema.testing import bases


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [
        ("bf16[tokens, 576]", "bfloat16", ("tokens", 576)),
        ("FP16[?]", "float16", (None,)),
        ("float8e4m3fn [ batch+1 ]", "float8e4m3fn", ("batch+1",)),
        ("i32[]", "int32", ()),
        ("f32", "float32", None),
        ("u8[*]", "uint8", None),
        ("?[3]", "undefined", (3,)),
        ("i8[-5]", "int8", (-5,)),
    ],
)
def test_specs_are_read(text: str, dtype: str, shape: tuple[object, ...] | None) -> None:
    assert TensorSpec.parse(text) == TensorSpec(dtype, shape)


@pytest.mark.parametrize(
    "text",
    ["", "[3]", "quaternion[3]", "bf16[3", "bf16[3]]", "bf16[,]", "bf16[3,]", "bf16[" + "9" * 30 + "]"],
)
def test_text_that_is_no_spec(text: str) -> None:
    with pytest.raises(InvalidArgument, match="A01"):
        TensorSpec.parse(text)
    with pytest.raises(InvalidArgument, match="A01"):
        PagedAttentionInputs(query=text)


dims = st.none() | st.integers(-(2**63), 2**63 - 1) | st.from_regex(r"[a-z_]{1,6}", fullmatch=True)


@given(st.sampled_from(sorted(ONNX_NUMBER)), st.none() | st.lists(dims, max_size=5).map(tuple))
def test_what_a_spec_prints_it_reads(dtype: str, shape: tuple[Any, ...] | None) -> None:
    spec = TensorSpec(dtype, shape)
    assert TensorSpec.parse(str(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(TensorSpec(dtype, shape))


def test_short_names_are_types() -> None:
    assert set(ALIASES.values()) <= set(ONNX_NUMBER)
    theirs = {name: {"float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.upper()) for name in ONNX_NUMBER}
    proto = dict(TensorProto.DataType.items())
    found = {name: proto[other] for name, other in theirs.items() if other in proto}
    assert found.items() <= ONNX_NUMBER.items()
    # The four-bit float and the two-bit types came with later releases of onnx.
    assert len(found) >= 23


@pytest.mark.parametrize(
    ("given_", "rule"),
    [
        ({}, "L01"),
        ({"num_heads": 1}, "L01"),
        ({"num_heads": 1, "kv_num_heads": "1"}, "L02"),
        ({"num_heads": 1, "kv_num_heads": True}, "L02"),
        ({"num_heads": 1, "kv_num_heads": 1.0}, "L02"),
        ({"num_heads": 1, "kv_num_heads": None}, "L02"),
        ({"num_heads": 1, "kv_num_heads": 1, "scale": "1"}, "L02"),
        ({"num_heads": 1, "kv_num_heads": 1, "k_quant_type": 1}, "L02"),
        ({"num_heads": 1, "kv_num_heads": 1, "qk_output": 1}, "L03"),
        ({"num_heads": 1, "qk_output": 1}, "L03"),
        ({"num_heads": "1"}, "L02"),
        ({"num_heads": 2**63, "kv_num_heads": 1}, "A04"),
        ({"num_heads": -(2**63) - 1, "kv_num_heads": 1}, "A04"),
        ({"num_heads": 10**5000, "kv_num_heads": 1}, "A04"),
    ],
)
def test_attributes_that_onnx_cannot_hold(given_: dict[str, Any], rule: str) -> None:
    for build in (
        lambda: PagedAttentionAttributes(**given_),
        lambda: PagedAttentionAttributes.model_validate(given_),
    ):
        with pytest.raises(InvalidArgument) as caught:
            build()
        assert caught.value.rule == rule
        assert len(str(caught.value)) < 400


def test_attributes_from_a_mapping_and_from_json() -> None:
    given_ = {"num_heads": 8, "kv_num_heads": 2, "scale": 0.5, "is_causal": 0}
    made = PagedAttentionAttributes(**given_)
    assert PagedAttentionAttributes.model_validate(given_) == made
    assert PagedAttentionAttributes.model_validate_json(json.dumps(given_)) == made
    assert PagedAttentionAttributes.model_validate_json(made.model_dump_json()) == made
    with pytest.raises(InvalidArgument):
        PagedAttentionAttributes.model_validate_json("{")
    with pytest.raises(InvalidArgument):
        PagedAttentionAttributes.model_validate([1])


def test_inputs_from_a_mapping_and_from_json() -> None:
    made = PagedAttentionInputs(query="bf16[t, 64]", key_cache=TensorSpec("bf16", (1, 16, 1, 64)))
    assert PagedAttentionInputs.model_validate(made.model_dump()) == made
    assert PagedAttentionInputs.model_validate_json(made.model_dump_json()) == made
    assert made.slots()[0] == made.query
    assert made.slots()[3] == made.key_cache
    assert len(made.slots()) == len(INPUT_NAMES) == 17
    for wrong in (
        {"queries": "bf16"},
        {"query": 3},
        {"query": {"dtype": 3}},
        {"query": {"dtype": "bf16", "shape": [1.5]}},
    ):
        with pytest.raises(InvalidArgument):
            PagedAttentionInputs(**wrong)
        with pytest.raises(InvalidArgument):
            PagedAttentionInputs.model_validate(wrong)


def test_models_are_frozen_and_export_a_json_schema() -> None:
    made = PagedAttentionAttributes(num_heads=1, kv_num_heads=1)
    with pytest.raises(ValueError, match="frozen"):
        made.num_heads = 2  # type: ignore[misc]
    assert PagedAttentionAttributes.model_json_schema()["additionalProperties"] is False
    assert set(PagedAttentionInputs.model_json_schema()["properties"]) == set(INPUT_NAMES)
    call = check(*pair(bases.latent()))
    with pytest.raises(AttributeError):
        call.tokens = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(call)) == call
    assert hash(call) == hash(check(*pair(bases.latent())))


def pair(parts: bases.Parts) -> tuple[PagedAttentionAttributes, PagedAttentionInputs]:
    return PagedAttentionAttributes(**parts[0]), PagedAttentionInputs(**parts[1])


def test_output_slots() -> None:
    assert len(PagedAttentionOutputs().slots()) == 1
    assert len(PagedAttentionOutputs(key_cache_out="bf16").slots()) == 2
    assert PagedAttentionOutputs(value_cache_out="bf16").slots()[1] is None
    assert len(PagedAttentionOutputs(slot_count=4).slots()) == 4
    assert PagedAttentionOutputs(output=None).slots() == (None,)
    with pytest.raises(InvalidArgument):
        PagedAttentionOutputs(slot_count=-1)


def test_a_call_keeps_symbols_and_finds_the_head_size_where_it_is() -> None:
    attributes, inputs = bases.separate()
    open_ = inputs | {
        "query": "bf16[tokens, hidden]",
        "past_seqlens": "i32[batch]",
        "cumulative_sequence_length": "i32[?]",
    }
    call = check(*pair((attributes, open_)))
    assert (call.tokens, call.batch, call.head_size, call.scale) == ("tokens", "batch", 64, 0.125)
    unknown = open_ | {
        "key": "bf16[t, w]",
        "value": "bf16[t, w]",
        "key_cache": "bf16[b, s, h, d]",
        "value_cache": "bf16",
    }
    call = check(*pair((attributes, unknown)))
    assert (call.head_size, call.v_head_size, call.scale, call.scale_source) == (None, None, 0.0, "default")
    assert (call.num_blocks, call.block_size) == ("b", "s")
    from_cache = open_ | {"key": "bf16[t, w]", "value": "bf16[t, w]"}
    assert check(*pair((attributes, from_cache))).head_size == 64


def test_a_call_normalises_what_ort_treats_alike() -> None:
    attributes, inputs = bases.separate()
    change = {
        "softcap": -3.0,
        "local_window_size": -7,
        "is_causal": 2,
        "rotary_interleaved": 2,
        "k_quant_type": "none",
    }
    call = check(*pair((attributes | change, inputs)))
    assert (call.softcap, call.local_window_size, call.causal, call.rotary_interleaved) == (
        0.0,
        -1,
        False,
        False,
    )
    assert call.k_quant_type == "NONE"
    assert call.rotary
    off = check(*pair((attributes | {"do_rotary": 2}, inputs)))
    assert not off.rotary
    empty = inputs | {"cos_cache": "bf16[9, 0]", "sin_cache": "bf16[9, 0]"}
    assert not check(*pair((attributes, empty))).rotary
    assert check(*pair((attributes | {"softcap": float("nan")}, inputs))).softcap == 0.0
    zero = check(*pair((attributes | {"scale": 0.0}, inputs)))
    assert (zero.scale, zero.scale_source) == (0.125, "default")
    assert math.isnan(check(*pair((attributes | {"scale": float("nan")}, inputs))).scale)


def test_head_size_0_has_an_infinite_default_scale() -> None:
    attributes, _ = bases.separate()
    inputs = {
        "query": "bf16[t, 7]",
        "key": "bf16[t, 0]",
        "value": "bf16[t, 0]",
        "key_cache": "bf16[1, 16, 2, 0]",
        "value_cache": "bf16[1, 16, 2, 0]",
        "cumulative_sequence_length": "i32[2]",
        "past_seqlens": "i32[1]",
        "block_table": "i32[1, 0]",
    }
    call = check(*pair((attributes | {"do_rotary": 0}, inputs)), ort="1.30")
    assert (call.head_size, call.scale, call.max_blocks) == (0, math.inf, 0)


wild_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["LATENT", "SEPARATE", "PER_TENSOR", "PER_CHANNEL", "int4", "int8"]),
    st.lists(st.integers(), max_size=2),
)
wild_specs = st.one_of(
    st.none(),
    st.builds(
        TensorSpec,
        st.sampled_from(["bfloat16", "float16", "int32", "float32", "int8", "uint8", "undefined"]),
        st.none()
        | st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 64, 128, 2**40, -1, None, "n"]), max_size=4).map(
            tuple
        ),
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(KINDS)), wild_values, max_size=6),
    st.dictionaries(st.sampled_from(INPUT_NAMES), wild_specs, max_size=17),
    st.sampled_from(["1.29", "1.30", "1.31", "1.32"]),
    st.sampled_from(["cuda", "webgpu", "paged-cuda", "cpu"]),
    st.booleans(),
)
def test_whatever_is_given_the_answer_is_a_call_or_a_typed_error(
    attributes: dict[str, Any], inputs: dict[str, Any], ort: str, provider: str, latent: bool
) -> None:
    base = bases.latent() if latent else bases.separate()
    try:
        call = check(
            PagedAttentionAttributes(**(base[0] | attributes)),
            PagedAttentionInputs(**(base[1] | inputs)),
            ort=ort,
            provider=provider,
        )
    except PagedSchemaError as error:
        assert error.rule and "\n" not in str(error)  # noqa: PT017, PT018 - both ways are fine
    else:
        assert call.num_heads % call.kv_num_heads == 0


def test_capabilities_list_every_mode_at_once() -> None:
    attributes, inputs = bases.separate()
    more = {"head_sink": "bf16[8]", "slot_mapping": "i32[t]", "attention_metadata": "i32[2]"}
    norms = {"q_norm_weight": "bf16[64]", "k_norm_weight": "bf16[64]"}
    open_ = {"query": "bf16[t, 512]", "key": "bf16[t, 128]", "value": "bf16[t, 128]"}
    change = {"softcap": 3.0, "local_window_size": 4, "is_causal": 0, "rotary_interleaved": 1}
    call = check(*pair((attributes | change, inputs | open_ | more | norms)))
    with pytest.raises(NotImplementedMode) as caught:
        require(call, Capability.paged_cuda())
    assert caught.value.modes == ("mode separate", "head_sink", "qk_norm")
    assert (caught.value.stage, caught.value.rule) == ("select", "N03")
    assert pickle.loads(pickle.dumps(caught.value)).modes == caught.value.modes
    assert Capability.webgpu_separate("1.29").unsupported(call) == (
        "dtype bfloat16", "softcap", "local_window", "head_sink", "qk_norm", "slot_mapping",
        "attention_metadata", "non_causal",
    )  # fmt: skip
    assert "local_window" not in Capability.webgpu_separate("1.31").unsupported(call)
    require(call, Capability.ort_cuda("1.31"))
    assert Capability.ort_cuda("1.29").unsupported(call) == ("non_causal",)


def test_our_op_takes_the_latent_base_and_knows_its_limits() -> None:
    attributes, inputs = bases.latent()
    require(check(*pair((attributes, inputs))), Capability.paged_cuda())
    require(check(*pair((attributes, inputs))), Capability.glm_dense_mla_latent())
    require(check(*pair((attributes | {"v_head_size": 1}, inputs))), Capability.paged_cuda())
    codes = {"key_cache": "i8[5, 16, 1, 192]", "k_scale": "f32[1]"}
    call = check(*pair((attributes | {"k_quant_type": "PER_TENSOR"}, inputs | codes)))
    assert Capability.paged_cuda().unsupported(call) == ("cache dtype int8", "quantized_cache")
    tables = {"cos_cache": "bf16[21, 32, 1]", "sin_cache": "bf16[21, 32, 1]"}
    call = check(*pair((attributes, inputs | tables)))
    assert Capability.paged_cuda().unsupported(call) == ("cos_cache of rank 3", "sin_cache of rank 3")
    assert {name for name in FEATURES if not Capability.paged_cuda().supports(name)} == {
        "head_sink", "qk_norm", "quantized_cache",
    }  # fmt: skip


def test_float32_is_no_mode_of_the_cuda_op() -> None:
    attributes, inputs = bases.latent()
    wide = {name: spec.replace("bf16", "f32") for name, spec in inputs.items() if spec}
    call = check(*pair((attributes, wide)), extensions={"float32"})
    assert (call.dtype, call.cache_dtype) == ("float32", "float32")
    assert Capability.paged_cuda().unsupported(call) == ("dtype float32",)


def test_importing_takes_only_pydantic() -> None:
    script = (
        "import sys, paged_schema;"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'onnx', 'google', 'paged_schema.audit')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_check_takes_mappings() -> None:
    attributes, inputs = bases.latent()
    assert check(attributes, inputs) == check(*pair((attributes, inputs)))
    with pytest.raises(InvalidArgument, match="L03"):
        check(attributes | {"qk_output": 1}, inputs)
    with pytest.raises(InvalidArgument, match="A02"):
        check(attributes, inputs | {"queries": "bf16"})
    with pytest.raises(InvalidArgument):
        check(3, inputs)  # type: ignore[arg-type]


def test_explain_takes_a_call() -> None:
    verdicts = explain(check(*pair(bases.separate())), sm=90)
    assert [verdict.backend for verdict in verdicts if verdict.serves] == ["memory-efficient"]
    assert all(verdict.reasons for verdict in verdicts if not verdict.serves)
