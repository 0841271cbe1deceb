"""What a hostile or careless caller hands over: a typed error each time, and never another library's."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from paged_schema import (
    Capability,
    InvalidArgument,
    NotImplementedMode,
    PagedAttentionAttributes,
    PagedAttentionInputs,
    PagedAttentionOutputs,
    PagedSchemaError,
    RunValues,
    TensorSpec,
    check,
)
from paged_schema.applicability import Plan, fit, fit_file
from paged_schema.errors import UnreadableModel
from paged_schema.reader import read_model
from paged_schema.testing import bases

ODD = [
    math.nan,
    10**6000,
    -(2**70),
    True,
    b"8",
    np.int64(8),
    np.ones(2),
    [10**6000],
    object(),
    (math.nan, {}),
]
MODELS = [PagedAttentionAttributes, PagedAttentionInputs, PagedAttentionOutputs, TensorSpec]


@pytest.mark.parametrize("got", ODD, ids=lambda value: type(value).__name__)
def test_an_error_survives_whatever_it_was_given(got: Any) -> None:
    for kind in (InvalidArgument, NotImplementedMode):
        error = kind("load", "A01", "tensor", got, "something else")
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert other == error
            assert hash(other) == hash(error)
            assert str(other) == str(error)
        assert len(repr(error)) < 1000


def test_an_error_keeps_plain_values_as_they_are() -> None:
    for got in (3, -0.5, "text", None, False, (1, 2, 3), [4, "a"]):
        assert InvalidArgument("load", "A01", "tensor", got, "x").got == got
    assert InvalidArgument("run", "R", "a", 1, "x") != InvalidArgument("run", "R", "a", 2, "x")
    modes = NotImplementedMode("run", "R", "a", 1, "x", modes=("sink",))
    assert pickle.loads(pickle.dumps(modes)).modes == ("sink",)
    assert modes != NotImplementedMode("run", "R", "a", 1, "x")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [1, None, b"query", (1, 2), math.nan])
def test_names_that_are_no_text(model: type[TensorSpec], name: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        model.model_validate({name: 1, "dtype": "bf16"})
    assert caught.value.rule in ("L03", "A02")


@pytest.mark.parametrize("name", [1, None, b"query"])
def test_check_with_names_that_are_no_text(name: Any) -> None:
    attributes, inputs = bases.latent()
    with pytest.raises(InvalidArgument, match="L03"):
        check({**attributes, name: 1}, inputs)
    with pytest.raises(InvalidArgument, match="A02"):
        check(attributes, {**inputs, name: "bf16[1]"})
    with pytest.raises(InvalidArgument, match="A02"):
        check(attributes, inputs | {"query": {name: 1, "dtype": "bf16"}})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", ["{", "[]", "null", '{"a": 1}', "\ud800", "7"])
def test_json_and_text_that_is_no_model(model: type[TensorSpec], text: str) -> None:
    with pytest.raises(PagedSchemaError):
        model.model_validate_json(text)
    with pytest.raises(PagedSchemaError):
        model.model_validate_strings({"num_heads": text, "query": text})


def test_any_mapping_will_do() -> None:
    attributes, inputs = bases.latent()
    specs = {name: TensorSpec.parse(text) for name, text in inputs.items() if text is not None}
    shapes = {name: {"dtype": spec.dtype, "shape": spec.shape} for name, spec in specs.items()}
    call = check(attributes, inputs)
    assert check(MappingProxyType(attributes), MappingProxyType(inputs)) == call
    assert check(attributes, shapes) == call


def test_a_tensor_without_a_type_is_no_tensor() -> None:
    for build in (
        lambda: TensorSpec.model_validate({"shape": [1]}),
        lambda: PagedAttentionInputs(query={"shape": [1]}),
        lambda: PagedAttentionInputs.model_validate_json('{"query": {"shape": [1]}}'),
    ):
        with pytest.raises(InvalidArgument, match="A01"):
            build()


@pytest.mark.parametrize("size", [2**63, -(2**63) - 1, 10**6000], ids=["above", "below", "huge"])
def test_dimensions_have_64_bits(size: int) -> None:
    with pytest.raises(InvalidArgument, match="A01"):
        TensorSpec("bf16", (size, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_keeps_what_is_not_finite(value: float) -> None:
    given = PagedAttentionAttributes(num_heads=1, kv_num_heads=1, scale=value)
    again = PagedAttentionAttributes.model_validate_json(given.model_dump_json()).scale
    assert repr(again) == repr(value)


def test_only_ascii_letters_have_a_case() -> None:
    attributes, inputs = bases.latent()
    inputs |= {"key_cache": "i8[5, 16, 1, 192]", "k_scale": "f32[1]"}
    assert check(attributes | {"k_quant_type": "per_tensor"}, inputs).k_quant_type == "PER_TENSOR"
    with pytest.raises(InvalidArgument, match="C04"):
        check(attributes | {"k_quant_type": "PER_TEN\u017fOR"}, inputs)


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "name", ["outputs", "declared", "values", "ort", "provider", "extensions", "sm", "strict"]
)
def test_arguments_of_check_of_any_kind(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidArgument) as caught:
        check(*bases.latent(), **options)
    assert caught.value.rule in ("A01", "A02", "A03", "S00")


@pytest.mark.parametrize("value", ["float32", 1, None])
def test_extensions_are_a_set_of_names(value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(*bases.latent(), extensions=value)
    assert (caught.value.rule, caught.value.got) == ("A03", value)


@pytest.mark.parametrize("sm", [0, -5, 1000])
def test_compute_capabilities_that_no_device_has(sm: int) -> None:
    with pytest.raises(InvalidArgument, match="sm"):
        check(*bases.latent(), sm=sm)
    check(*bases.latent(), sm=1)
    check(*bases.latent(), sm=999)


def test_outputs_and_declared_may_be_mappings() -> None:
    attributes, inputs = bases.latent()
    call = check(attributes, inputs, outputs={"key_cache_out": inputs["key_cache"]}, declared=inputs)
    assert call.aliases == (("key_cache", "key_cache_out"),)
    with pytest.raises(InvalidArgument, match="A02"):
        check(attributes, inputs, outputs={"present_key": "bf16"})


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": [1, 2]},
        {"metadata": (1, 2.0)},
        {"metadata": (True, 2)},
        {"metadata": 3},
        {"metadata": {1: 2}},
        {"addresses": (1, 2)},
        {"addresses": None},
        {"addresses": {"key_cache": "here"}},
        {"kv_tokens": 1.5},
    ],
)
def test_host_values_that_are_no_numbers(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="A03"):
        RunValues(**fields)


@pytest.mark.parametrize("entries", [(), (1,), (1, 2, 3, 4)])
def test_host_metadata_of_another_length_than_declared(entries: tuple[int, ...]) -> None:
    attributes, inputs = bases.latent()
    with pytest.raises(InvalidArgument, match="P05"):
        check(attributes, inputs | {"attention_metadata": "i32[2]"}, values=RunValues(metadata=entries))


@pytest.mark.parametrize("version", ["1", "x.y", "", "1.28", None, 1.31])
def test_capabilities_of_versions_that_are_not_known(version: Any) -> None:
    for make in (Capability.webgpu_separate, Capability.ort_cuda):
        with pytest.raises(InvalidArgument, match="A03"):
            make(version)
    assert Capability.webgpu_separate("1.31.1").supports("head_sink")


CONFIG: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "kv_lora_rank": None,
}


@pytest.mark.parametrize(
    "name",
    ["partial_rotary_factor", "query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping"],
)
@pytest.mark.parametrize("value", [10**400, math.nan, math.inf, -1, True, "1"], ids=lambda _: "odd")
def test_numbers_of_a_configuration(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="F02"):
        fit({**CONFIG, name: value})


def test_what_is_no_configuration_and_no_plan() -> None:
    for config in ([], None, "text", 3):
        with pytest.raises(InvalidArgument, match="F02"):
            fit(config)  # type: ignore[arg-type]
    odd: list[dict[str, Any]] = [
        {"tensor_parallel": "2"}, {"tensor_parallel": True}, {"block_size": None}, {"block_size": 16.0},
        {"ort": []}, {"ort": "1.28"}, {"sm": "90"}, {"sm": None}, {"sm": 0},
    ]  # fmt: skip
    for fields in odd:
        with pytest.raises(InvalidArgument, match="A03"):
            Plan(**fields)


def test_the_exported_schema_admits_both_forms_of_a_tensor() -> None:
    exported = PagedAttentionInputs.model_json_schema()["properties"]["query"]["anyOf"]
    assert {"type": "string"} in exported
    assert {"$ref": "#/$defs/TensorSpec"} in exported
    text = '{"query": "bf16[tokens, 64]", "key": {"dtype": "bf16", "shape": ["tokens", 64]}}'
    made = PagedAttentionInputs.model_validate_json(text)
    assert made.query == made.key


def test_a_changed_copy_is_checked() -> None:
    attributes = PagedAttentionAttributes(num_heads=4, kv_num_heads=1)
    assert attributes.model_copy() == attributes.model_copy(update={}) == attributes
    assert attributes.model_copy(update={"scale": 0.5}).model_fields_set == {
        "num_heads", "kv_num_heads", "scale",
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="L02"):
        attributes.model_copy(update={"scale": "x"})
    inputs = PagedAttentionInputs(query="bf16[t, 64]")
    assert inputs.model_copy(update={"key": "bf16[t, 64]"}).key == inputs.query
    with pytest.raises(InvalidArgument, match="A01"):
        TensorSpec("bf16", (1,)).model_copy(update={"shape": "t"})


def test_configuration_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("\ufeff" + json.dumps(CONFIG), encoding="utf-8")
    assert fit_file(path).fits
    path.write_bytes(b" " * (2**24 + 1))
    for unusable in (path, Path("/dev/zero")):
        with pytest.raises(InvalidArgument, match="16 MiB"):
            fit_file(unusable)


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    os.mkfifo(path)
    with pytest.raises(UnreadableModel, match="pipe"):
        read_model(path)
