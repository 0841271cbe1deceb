"""Every rule at its boundary: the last value that passes and the first that does not, with the rule.

A row names one rule, a change to a base that breaks it and nothing before it, and a change that keeps it.
"""

# ruff: noqa: E501 - a table with one row a line reads best

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from paged_schema import (
    Call,
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
from paged_schema.attributes import KINDS
from paged_schema.declaration import Attribute, Declaration, check_declaration
from paged_schema.rules import all_rules
from paged_schema.testing import bases

Base = Callable[[], bases.Parts]
Change = Mapping[str, Any]
OPTIONS = {"ort", "provider", "outputs", "declared", "values", "sm", "extensions"}
SEPARATE, LATENT = bases.separate, bases.latent


def decide(base: Base, change: Change) -> Call:
    attributes, inputs = base()
    options: dict[str, Any] = {}
    for name, value in change.items():
        if name in OPTIONS:
            options[name] = value
        elif name in PagedAttentionAttributes.model_fields:
            attributes[name] = value
        else:
            inputs[name] = value
    given = {name: value for name, value in attributes.items() if value is not None}
    return check(PagedAttentionAttributes(**given), PagedAttentionInputs(**inputs), **options)


def verdict(base: Base, change: Change) -> str:
    try:
        decide(base, change)
    except PagedSchemaError as error:
        return error.rule
    return "ok"


def slots(count: int, *named: int) -> PagedAttentionOutputs:
    names = ("output", "key_cache_out", "value_cache_out")
    specs = {names[index]: TensorSpec("undefined") for index in (0, *named)}
    return PagedAttentionOutputs(**specs, slot_count=count)


def heads(size: int, **more: Any) -> Change:
    """The SEPARATE base without rotary, with another head size."""
    found = {
        "query": f"bf16[3, {8 * size}]",
        "key": f"bf16[3, {2 * size}]",
        "value": f"bf16[3, {2 * size}]",
        "key_cache": f"bf16[5, 16, 2, {size}]",
        "value_cache": f"bf16[5, 16, 2, {size}]",
        "cos_cache": None,
        "sin_cache": None,
        "do_rotary": 0,
    }
    return found | more


def latent_heads(size: int, **more: Any) -> Change:
    """The LATENT base without rotary, with another head size."""
    found = {
        "query": f"bf16[3, {4 * size}]",
        "key": f"bf16[3, {size}]",
        "key_cache": f"bf16[5, 16, 1, {size}]",
        "rotary_offset": 0,
        "cos_cache": None,
        "sin_cache": None,
        "do_rotary": 0,
    }
    return found | more


PACKED = {"query": "bf16[3, 768]", "key": None, "value": None}
# A file that says nothing of the inputs' shapes leaves everything to the run.
RANKLESS = {
    "declared": {
        "query": "bf16",
        "key_cache": "bf16",
        "cumulative_sequence_length": "i32",
        "past_seqlens": "i32",
        "block_table": "i32",
    }
}
OPEN_QUERY = {"query": "bf16[tokens, hidden]"}
TENSOR = {
    "k_quant_type": "PER_TENSOR",
    "v_quant_type": "PER_TENSOR",
    "k_scale": "f32[1]",
    "v_scale": "f32[1]",
}
INT8 = TENSOR | {"key_cache": "i8[5, 16, 2, 64]", "value_cache": "i8[5, 16, 2, 64]"}
CHANNEL = INT8 | {"k_quant_type": "PER_CHANNEL", "k_scale": "f32[2, 1, 64]"}
U8 = {"key_cache": "u8[5, 16, 2, 32]", "value_cache": "u8[5, 16, 2, 32]"}
INT4 = TENSOR | U8 | {"k_cache_dtype": "int4", "v_cache_dtype": "int4"}
LATENT8 = {"key_cache": "i8[5, 16, 1, 192]", "k_quant_type": "PER_TENSOR", "k_scale": "f32[1]"}
LATENT4 = {"key_cache": "u8[5, 16, 1, 96]", "k_quant_type": "PER_TENSOR", "k_scale": "f32[1]"}
DECODE = {"query": "bf16[2, 512]", "key": "bf16[2, 128]", "value": "bf16[2, 128]"}
PLAIN_SHAPES = {"do_rotary": 0, "cos_cache": None, "sin_cache": None}


def entries(*given: int) -> Change:
    return {"attention_metadata": f"i32[{len(given)}]", "values": RunValues(metadata=given)}


NO_TOKENS = {"query": "bf16[0, 768]", "key": "bf16[0, 192]"}
NO_ROWS = {"query": "bf16[0, 512]", "key": "bf16[0, 128]", "value": "bf16[0, 128]"}
ONE_HEAD = {
    "num_heads": 1,
    "kv_num_heads": 1,
    "key_cache": "bf16[5, 16, 1, 64]",
    "value_cache": "bf16[5, 16, 1, 64]",
}
ROTARY_1040 = heads(1040, do_rotary=1, cos_cache="bf16[9, 8]", sin_cache="bf16[9, 8]") | {
    "query": "bf16[2, 8320]",
    "key": "bf16[2, 2080]",
    "value": "bf16[2, 2080]",
}
WIDE4 = (
    heads(264)
    | INT4
    | {
        "key_cache": "u8[5, 16, 2, 132]",
        "value_cache": "u8[5, 16, 2, 132]",
        "head_sink": "bf16[8]",
        "attention_metadata": "i32[2]",
    }
)

# rule, base, what breaks it, what keeps it
ROWS: list[tuple[str, Base, Change, Change]] = [
    ("L03", SEPARATE, {"is_causal": 1, "ort": "1.29"}, {"is_causal": 1, "ort": "1.30"}),
    ("L05", SEPARATE, {"outputs": slots(4)}, {"outputs": slots(3)}),
    ("L06", SEPARATE, {"query": None}, {}),
    ("L06", SEPARATE, {"key_cache": None}, {}),
    ("L06", SEPARATE, {"cumulative_sequence_length": None}, {}),
    ("L06", SEPARATE, {"past_seqlens": None}, {}),
    ("L06", SEPARATE, {"block_table": None}, {}),
    ("L07", SEPARATE, {"query": "f32[3, 512]"}, {}),
    ("L07", SEPARATE, U8 | {"ort": "1.29"}, INT4 | {"ort": "1.30"}),
    ("L07", SEPARATE, {"block_table": "i64[2, 2]"}, {"block_table": "?[2, 2]"}),
    ("L07", SEPARATE, INT8 | {"k_scale": "f16[1]"}, INT8),
    ("L08", SEPARATE, {"sin_cache": "f16[21, 32]"}, {"sin_cache": "?[21, 32]"}),
    ("L09", SEPARATE, {"value_cache": "i8[5, 16, 2, 64]"}, {"value_cache": "?[5, 16, 2, 64]"}),
    ("L11", SEPARATE, {"kv_cache_layout": "separate"}, {"kv_cache_layout": "SEPARATE"}),
    ("L12", SEPARATE, {"query": "bf16[3, 8, 64]"}, {"query": "bf16"}),
    ("L13", SEPARATE, PACKED | OPEN_QUERY, PACKED | {"query": "bf16"}),
    ("L13", SEPARATE, PACKED | {"query": "bf16[3, 0]"}, PACKED | {"query": "bf16[3, 768]"}),
    ("L13", SEPARATE, PACKED | {"num_heads": 0}, PACKED | {"num_heads": 2, "query": "bf16[3, 384]"}),
    ("L13", SEPARATE, PACKED | {"kv_num_heads": -1}, PACKED),
    ("L14", SEPARATE, PACKED | {"query": "bf16[3, 769]"}, PACKED),
    ("L14", SEPARATE, {"value": None, "query": "bf16[3, 513]"}, PACKED),
    ("L15", LATENT, {"num_heads": 0}, {"num_heads": 4}),
    ("L16", LATENT, {"query": "bf16[3, 770]"}, {}),
    ("L17", LATENT, {"v_head_size": 193}, {"v_head_size": 192}),
    ("L18", LATENT, {"outputs": slots(3)}, {"outputs": slots(2)}),
    ("L19", SEPARATE, {"outputs": slots(2)}, {"outputs": slots(3)}),
    ("L20", SEPARATE, {"outputs": slots(3), "value_cache": None}, {"outputs": slots(3)}),
    ("L21", SEPARATE, {"outputs": slots(3), "key_cache": "bf16[5, 16, 2]"}, {"outputs": slots(3)}),
    ("L22", LATENT, {"outputs": slots(2), "key_cache": "bf16"}, {"outputs": slots(1), "key_cache": "bf16"}),
    ("L10", SEPARATE, {"outputs": PagedAttentionOutputs(output="f16")},
     {"outputs": PagedAttentionOutputs(output="bf16")}),
    ("L10", LATENT, {"outputs": PagedAttentionOutputs(key_cache_out="i8")}, {"outputs": slots(2, 1)}),
    ("X02", SEPARATE, PACKED | {"num_heads": 2, "kv_num_heads": 2**63 - 1}, PACKED),
    ("C02", SEPARATE, PACKED | {"num_heads": 4, "kv_num_heads": 2**63 - 1}, PACKED),
    ("N01", SEPARATE, {"provider": "cpu"}, {"provider": "cuda"}),
    ("N02", SEPARATE, {"key_cache": "f16[5, 16, 2, 64]", "value_cache": "f16[5, 16, 2, 64]"}, {}),
    ("C01", SEPARATE, {"num_heads": 0}, {}),
    ("C01", SEPARATE, {"num_heads": -8}, {}),
    ("C02", SEPARATE, {"kv_num_heads": 0}, {}),
    ("C02", SEPARATE, {"kv_num_heads": 3}, {}),
    ("C02", SEPARATE, {"kv_num_heads": -2}, {}),
    ("C03", SEPARATE, {"qk_norm_epsilon": 0.0}, {"qk_norm_epsilon": 1e-30}),
    ("C03", SEPARATE, {"qk_norm_epsilon": float("nan")}, {}),
    ("C03", SEPARATE, {"qk_norm_epsilon": 1e60}, {"qk_norm_epsilon": 1e30}),
    ("C03", SEPARATE, {"qk_norm_epsilon": -1.0}, {}),
    ("C04", SEPARATE, {"k_quant_type": "per tensor"}, {"k_quant_type": "none"}),
    ("C04", SEPARATE, {"v_quant_type": "BAD"}, {"v_quant_type": "None"}),
    ("C05", SEPARATE, {"k_cache_dtype": "bf16"}, {"k_cache_dtype": "BFloat16"}),
    ("C05", SEPARATE, {"v_cache_dtype": "uint8"}, {"v_cache_dtype": "bfloat16"}),
    ("C07", LATENT, {"v_head_size": -1}, {"v_head_size": 0}),
    ("C08", SEPARATE, {"rotary_offset": -8}, {"rotary_offset": 0}),
    ("C08", SEPARATE, {"rotary_offset": 2**31}, {"rotary_offset": 2**32}),
    ("R01", LATENT, {"num_heads": 1025, "query": "bf16[3, 196800]"},
     {"num_heads": 1024, "query": "bf16[3, 196608]"}),
    ("X03", SEPARATE, {"num_heads": 2**33, "kv_num_heads": 2**32}, {}),
    ("R02", SEPARATE, {"num_heads": 2**32 + 8, "kv_num_heads": 3}, {"num_heads": 2**32 + 8}),
    ("X06", SEPARATE, {"num_heads": 2**32}, {}),
    ("X06", LATENT, {"num_heads": 2**32, "v_head_size": 0}, {}),
    ("R03a", LATENT, {"key": None}, {}),
    ("R03b", LATENT, {"value": "bf16[3, 192]"}, {}),
    ("R03d", LATENT, {"query": "bf16[3, 770]", "v_head_size": 0}, {"v_head_size": 0}),
    ("R03e", LATENT, latent_heads(196), latent_heads(200)),
    ("R03f", LATENT, {"key": "bf16[3, 1, 192]"}, {"key": "bf16"}),
    ("R03f", LATENT, {"key": "bf16[4, 192]"}, {"key": "bf16[t, 192]"}),
    ("R03f", LATENT, {"key": "bf16[3, 200]"}, {"key": "bf16[3, w]"}),
    ("R04g", SEPARATE, {"query": "bf16[3, 513]"}, {"query": "bf16[3, 513]", "ort": "1.30"}),
    ("R04b", SEPARATE, heads(60), heads(56)),
    ("R04c", SEPARATE, PACKED | {"key": "bf16[3, 128]"}, PACKED),
    ("R04d", SEPARATE, {"key": "bf16[3, 2, 64]"}, {"key": "bf16"}),
    ("R04d", SEPARATE, {"key": "bf16[4, 128]"}, {"key": "bf16[?, 128]"}),
    ("R04e", SEPARATE, {"key": "bf16[3, 129]", "value": "bf16[3, 129]"}, {}),
    ("R04e", SEPARATE, {"key": "bf16[3, 144]", "value": "bf16[3, 144]"}, {}),
    ("R04f", SEPARATE, {"value": "bf16[3, 128, 1]"}, {"value": "bf16"}),
    ("R04f", SEPARATE, {"value": "bf16[4, 128]"}, {"value": "bf16[t, 128]"}),
    ("R04f", SEPARATE, {"value": "bf16[3, 64]"}, {"value": "bf16[3, w]"}),
    ("R05b", SEPARATE, PACKED | {"query": "bf16[3, 720]"}, PACKED),
    ("R05d", SEPARATE, {"key": None, "query": "bf16[3, 769]"}, PACKED),
    ("R05c", SEPARATE, {"key": None, "query": "bf16[3, 768]"}, PACKED),
    ("R06a", SEPARATE, {"v_head_size": 65}, {"v_head_size": 64}),
    ("R06b", SEPARATE, {"v_head_size": 63}, {"v_head_size": 64}),
    ("R06c", LATENT, {"scale": None}, {"scale": None, "v_head_size": 192}),
    ("R06c", LATENT, {"scale": 0.0}, {"scale": 1e-30}),
    ("R06c", LATENT, {"scale": 1e-60}, {"scale": float("nan")}),
    ("R07a", LATENT, {"value_cache": "bf16[5, 16, 1, 192]"}, {}),
    ("R07b", LATENT, {"kv_num_heads": 2, "key": "bf16[3, 384]"}, {}),
    ("R07c", LATENT, {"head_sink": "bf16[4]"}, {}),
    ("R07d", LATENT, {"q_norm_weight": "bf16[192]"}, {}),
    ("R07d", LATENT, {"k_norm_weight": "bf16[192]"}, {}),
    ("R07e", LATENT, LATENT8 | {"v_quant_type": "PER_TENSOR"}, LATENT8),
    ("R07e", LATENT, LATENT8 | {"v_cache_dtype": "int8"}, LATENT8 | {"k_cache_dtype": "int8"}),
    ("R07e", LATENT, LATENT8 | {"v_scale": "f32[1]"}, LATENT8),
    ("R07f", SEPARATE, {"value_cache": None}, {}),
    ("R08a", SEPARATE, {"key_cache": "bf16[5, 16, 128]"}, {"key_cache": "bf16"}),
    ("R08b", LATENT, {"key_cache": "bf16[5, 15, 1, 192]"}, {"key_cache": "bf16[5, 16, 1, 192]"}),
    ("R08b", LATENT, {"key_cache": "bf16[5, 8, 1, 192]"}, {"key_cache": "bf16[5, b, 1, 192]"}),
    ("R08b", LATENT, {"key_cache": "bf16[5, 48, 1, 192]"}, {"key_cache": "bf16[5, 64, 1, 192]"}),
    ("R08b", LATENT, {"key_cache": f"bf16[0, {2**40}, 1, 192]"}, {"key_cache": f"bf16[0, {2**30}, 1, 192]"}),
    ("R08c", LATENT, {"key_cache": "bf16[5, 16, 2, 192]"}, {"key_cache": "bf16[5, 16, h, 192]"}),
    ("R08c", LATENT, {"key_cache": "bf16[5, 16, 1, 200]"}, {"key_cache": "bf16[5, 16, 1, w]"}),
    ("R08c", SEPARATE, INT4 | {"key_cache": "u8[5, 16, 2, 64]"}, INT4),
    ("R08d", SEPARATE, {"value_cache": "bf16[5, 16, 2]"}, {"value_cache": "bf16"}),
    ("R08d", SEPARATE, {"value_cache": "bf16[6, 16, 2, 64]"}, {"value_cache": "bf16[?, 16, 2, 64]"}),
    ("R08d", SEPARATE, {"value_cache": "bf16[5, 32, 2, 64]"}, {"value_cache": "bf16[5, ?, 2, 64]"}),
    ("R08d", SEPARATE, {"value_cache": "bf16[5, 16, 1, 64]"}, {"value_cache": "bf16[5, 16, ?, 64]"}),
    ("R08d", SEPARATE, {"value_cache": "bf16[5, 16, 2, 72]"}, {"value_cache": "bf16[5, 16, 2, ?]"}),
    ("I01", LATENT, LATENT4, LATENT8),
    ("I03", SEPARATE,
     heads(1032) | INT4 | {"key_cache": "u8[5, 16, 2, 516]", "value_cache": "u8[5, 16, 2, 516]"},
     heads(1024) | INT4 | {"key_cache": "u8[5, 16, 2, 512]", "value_cache": "u8[5, 16, 2, 512]"}),
    ("R09a", LATENT, {"cumulative_sequence_length": "i32[3, 1]"}, {"cumulative_sequence_length": "i32"}),
    ("R09a", LATENT,
     {"cumulative_sequence_length": "i32[1]", "past_seqlens": "i32[0]", "block_table": "i32[0, 2]"},
     {"cumulative_sequence_length": "i32[2]", "past_seqlens": "i32[1]", "block_table": "i32[1, 2]"}),
    ("R09b", LATENT, {"past_seqlens": "i32[1, 2]"}, {"past_seqlens": "i32"}),
    ("R09b", LATENT, {"past_seqlens": "i32[3]"}, {"past_seqlens": "i32[b]"}),
    ("R10", LATENT, {"block_table": "i32[4]"}, {"block_table": "i32[2, 0]"}),
    ("R10", LATENT, {"block_table": "i32[1, 2]"}, {"block_table": "i32[b, 2]"}),
    ("R11", LATENT, {"slot_mapping": "i32[1, 3]"}, {"slot_mapping": "i32"}),
    ("R11", LATENT, {"slot_mapping": "i32[2]"}, {"slot_mapping": "i32[3]"}),
    ("R12", SEPARATE, DECODE | {"head_sink": "bf16[8, 1]"}, DECODE | {"head_sink": "bf16[8]"}),
    ("R12", SEPARATE, DECODE | {"head_sink": "bf16[2]"}, DECODE | {"head_sink": "bf16[n]"}),
    ("R13", SEPARATE, {"q_norm_weight": "bf16[64]"}, {"q_norm_weight": "bf16[64]", "k_norm_weight": "bf16[64]"}),
    ("R13", SEPARATE, {"k_norm_weight": "bf16[64]"}, {}),
    ("R13", SEPARATE, {"q_norm_weight": "bf16[64]", "k_norm_weight": "bf16[32]"}, {}),
    ("R13", SEPARATE, {"q_norm_weight": "bf16[32]", "k_norm_weight": "bf16[64]"}, {}),
    ("R13", SEPARATE, {"q_norm_weight": "bf16[64, 1]", "k_norm_weight": "bf16[64]"}, {}),
    ("R14a", SEPARATE, {"sin_cache": None}, {}),
    ("R14a", SEPARATE, {"cos_cache": None}, {}),
    ("R14f", SEPARATE, {"cos_cache": "bf16[22, 32]"}, {"cos_cache": "bf16[22, 32]", "ort": "1.30"}),
    ("R14f", SEPARATE, {"cos_cache": "bf16[21, 32, 1]"}, {"cos_cache": "bf16[?, 32]"}),
    ("X01", SEPARATE, {"cos_cache": "bf16[32]", "sin_cache": "bf16[32]"}, {"cos_cache": "bf16", "sin_cache": "bf16"}),
    ("X01", SEPARATE, {"sin_cache": "bf16[32]", "ort": "1.30"}, {"ort": "1.30"}),
    ("X01", SEPARATE, {"cos_cache": "bf16[]", "ort": "1.30"},
     {"cos_cache": "bf16[21, 32, 5]", "sin_cache": "bf16[21, 32, 5]"}),
    ("R14b", SEPARATE, heads(72, cos_cache="bf16[9, 8]", sin_cache="bf16[9, 8]"),
     heads(80, cos_cache="bf16[9, 8]", sin_cache="bf16[9, 8]")),
    ("R14d", SEPARATE, {"cos_cache": "bf16[9, 40]", "sin_cache": "bf16[9, 40]"},
     {"cos_cache": "bf16[9, 32]", "sin_cache": "bf16[9, 32]"}),
    ("R14d", SEPARATE, {"cos_cache": "bf16[9, 12]", "sin_cache": "bf16[9, 12]"},
     {"cos_cache": "bf16[9, 0]", "sin_cache": "bf16[9, 0]"}),
    ("R14d", SEPARATE, {"sin_cache": "bf16[9, 20]", "ort": "1.30"}, {"sin_cache": "bf16[9, ?]", "ort": "1.30"}),
    ("R14e", SEPARATE, {"sin_cache": "bf16[21, 24]", "ort": "1.30"}, {"ort": "1.30"}),
    ("R15", LATENT, {"rotary_offset": 124}, {"rotary_offset": 120}),
    ("R15", LATENT, {"rotary_offset": 136}, {"rotary_offset": 128}),
    ("R15", SEPARATE, PLAIN_SHAPES | {"rotary_offset": 72}, PLAIN_SHAPES | {"rotary_offset": 64}),
    ("R16a", SEPARATE, {"k_scale": "f32[1]"}, {}),
    ("R16a", SEPARATE, {"v_scale": "f32[1]"}, {}),
    ("R16b", LATENT, {"key_cache": "i8[5, 16, 1, 192]"}, LATENT8),
    ("R16b", SEPARATE, INT8 | {"v_quant_type": "NONE", "v_scale": None}, INT8),
    ("R16c", SEPARATE, TENSOR, INT8),
    ("R16c", SEPARATE, {"v_quant_type": "PER_TENSOR", "v_scale": "f32[1]"}, {}),
    ("R16d", SEPARATE, INT8 | {"k_scale": None}, INT8),
    ("R16d", SEPARATE, INT8 | {"v_scale": None}, INT8),
    ("R16e", SEPARATE, INT8 | {"k_scale": "f32[2]"}, INT8 | {"k_scale": "f32[]"}),
    ("R16e", SEPARATE, INT8 | {"v_scale": "f32[1, 0]"}, INT8 | {"v_scale": "f32[1, 1, 1]"}),
    ("R16f", SEPARATE, CHANNEL | {"k_scale": "f32[128]"}, CHANNEL | {"k_scale": "f32[2, 64]"}),
    ("R16f", SEPARATE, CHANNEL | {"k_scale": "f32[64]"}, CHANNEL | {"k_scale": "f32[1, 2, 1, 64]"}),
    ("R16f", SEPARATE, CHANNEL | {"k_scale": "f32[]"}, CHANNEL | {"k_scale": "f32"}),
    ("R16f", SEPARATE, CHANNEL | {"k_scale": "f32[n, 32]"}, CHANNEL | {"k_scale": "f32[n, 64]"}),
    ("R17", SEPARATE, {"k_cache_dtype": "float16"}, {"k_cache_dtype": "bfloat16"}),
    ("R17", SEPARATE, INT8 | {"v_cache_dtype": "int4"}, INT8 | {"v_cache_dtype": "INT8"}),
    ("I02", SEPARATE, INT4 | {"k_cache_dtype": ""}, INT4),
    ("I02", SEPARATE, INT4 | {"v_cache_dtype": "float4e2m1"}, INT4 | {"v_cache_dtype": "INT4"}),
    ("R18", LATENT, {"attention_metadata": "i32[3]", "ort": "1.29"}, {"attention_metadata": "i32[3]"}),
    ("R18", LATENT, {"attention_metadata": "i32[4]"}, {"attention_metadata": "i32[2]"}),
    ("R18", LATENT, {"attention_metadata": "i32[1]"}, {"attention_metadata": "i32"}),
    ("R18", LATENT, {"attention_metadata": "i32[2, 1]"}, {"attention_metadata": "i32[n]"}),
    ("X07", SEPARATE, OPEN_QUERY | {"num_heads": 2**32 - 8, "key": "bf16"}, OPEN_QUERY | {"key": "bf16"}),
    ("P01", SEPARATE, {"cos_cache": None, "sin_cache": None}, PLAIN_SHAPES),
    ("P01", SEPARATE, {"cos_cache": None, "sin_cache": None},
     {"cos_cache": None, "sin_cache": None, "do_rotary": 2}),
    ("P02", LATENT, {"values": RunValues(addresses={"key_cache": 16, "key_cache_out": 32})},
     {"values": RunValues(addresses={"key_cache": 16, "key_cache_out": 16})}),
    ("P02", SEPARATE, {"values": RunValues(addresses={"value_cache": 16, "value_cache_out": 32})},
     {"values": RunValues(addresses={"value_cache": 16})}),
    ("P04", LATENT, latent_heads(6000, v_head_size=5905), latent_heads(6000, v_head_size=5904)),
    ("P04", LATENT, latent_heads(8192, v_head_size=8192),
     latent_heads(8192, v_head_size=8192) | {"query": "bf16[0, 32768]", "key": "bf16[0, 8192]"}),
    ("P05", LATENT, entries(0, 0) | {"values": RunValues(metadata=(0,))}, entries(0, 0)),
    ("P05", LATENT, entries(0, 0) | {"values": RunValues(metadata=(0, 0, 0, 0))}, entries(0, 0)),
    ("P05", LATENT, entries(-1, 0), entries(0, 0)),
    ("P05", LATENT, entries(0, 0, -1), entries(1, 0, 0)),
    ("P05", LATENT, entries(0, 20, 21), entries(0, 20, 20)),
    ("P05", LATENT, entries(0, 0, 33), entries(0, 0, 32)),
    ("P05", LATENT, entries(0, 99, 33), entries(0, 99, 32)),
    ("P05", LATENT, entries(0, 5, 6) | {"block_table": "i32[2, c]"}, entries(0, 0, 99) | {"block_table": "i32[2, c]"}),
    ("P06", LATENT, {"is_causal": 0, "ort": "1.30"}, {"is_causal": 0}),
    ("P06", SEPARATE, {"is_causal": 2, "ort": "1.30"},
     {"is_causal": 2, "ort": "1.30", "key_cache": "bf16[5, 256, 2, 64]", "value_cache": "bf16[5, 256, 2, 64]"}),
    ("P06", SEPARATE, {"is_causal": 0, "ort": "1.30", "sm": 75} | INT8, {"is_causal": 0, "ort": "1.30"} | INT8),
    ("P06", LATENT, {"is_causal": 0, "ort": "1.30"},
     {"is_causal": 0, "ort": "1.30", "query": "bf16[0, 768]", "key": "bf16[0, 192]"}),
    ("P07", SEPARATE, {"values": RunValues(kv_tokens=0)}, {"values": RunValues(kv_tokens=1)}),
    ("P08", SEPARATE, heads(1032), heads(1024)),
    ("P08", SEPARATE, {"sm": 75}, {"sm": 80}),
    ("P08", SEPARATE, heads(5960) | {"query": "bf16[2, 47680]", "key": "bf16[2, 11920]", "value": "bf16[2, 11920]"},
     heads(5952) | {"query": "bf16[2, 47616]", "key": "bf16[2, 11904]", "value": "bf16[2, 11904]"}),
    ("P09", SEPARATE, {"head_sink": "bf16[8]"}, DECODE | {"head_sink": "bf16[8]"}),
    ("P09", SEPARATE, {"head_sink": "bf16[8]", "key_cache": "bf16[5, 128, 2, 64]", "value_cache": "bf16[5, 128, 2, 64]"},
     {"head_sink": "bf16[8]", "key_cache": "bf16[5, 256, 2, 64]", "value_cache": "bf16[5, 256, 2, 64]"}),
    ("P09", SEPARATE, {"head_sink": "bf16[8]"}, {"head_sink": "bf16[8]"} | INT8),
    ("P09", SEPARATE, {"head_sink": "bf16[8]"}, {"head_sink": "bf16[8]", "query": "bf16[t, 512]", "key": "bf16[t, 128]"}),
    ("P10", SEPARATE,
     heads(1040, do_rotary=1, cos_cache="bf16[9, 8]", sin_cache="bf16[9, 8]")
     | {"query": "bf16[2, 8320]", "key": "bf16[2, 2080]", "value": "bf16[2, 2080]"},
     heads(1024, do_rotary=1, cos_cache="bf16[9, 8]", sin_cache="bf16[9, 8]")
     | {"query": "bf16[2, 8192]", "key": "bf16[2, 2048]", "value": "bf16[2, 2048]"}),
    ("P10", SEPARATE,
     heads(1032, q_norm_weight="bf16[1032]", k_norm_weight="bf16[1032]")
     | {"query": "bf16[2, 8256]", "key": "bf16[2, 2064]", "value": "bf16[2, 2064]"},
     heads(1032) | {"query": "bf16[2, 8256]", "key": "bf16[2, 2064]", "value": "bf16[2, 2064]"}),
    ("X05", SEPARATE, heads(0), heads(0) | {"query": "bf16[0, 0]", "key": "bf16[0, 0]", "value": "bf16[0, 0]"}),
    ("X05", SEPARATE, heads(0), heads(0) | {"query": "bf16[t, 0]", "key": "bf16[t, 0]", "value": "bf16[t, 0]"}),
    ("P02", LATENT, {"values": RunValues(addresses={"key_cache": 16, "key_cache_out": 32})},
     {"values": RunValues(addresses={"key_cache_out": 16})}),
    ("P04", LATENT, latent_heads(6000, v_head_size=5905), OPEN_QUERY),
    ("P04", LATENT, latent_heads(6000, v_head_size=0), latent_heads(5952, v_head_size=0)),
    ("P05", LATENT, entries(-1, 0), {"values": RunValues(metadata=(-1, 0))}),
    ("P05", LATENT, entries(-1, 0), entries(-1, 0) | NO_TOKENS),
    ("P05", LATENT, entries(0, 0, 33), entries(0, 0, 33) | {"key_cache": "bf16[5, b, 1, 192]"}),
    ("P05", LATENT, entries(0, 0, 33), entries(0, 0, 33) | {"block_table": "i32"}),
    ("P07", SEPARATE, {"values": RunValues(kv_tokens=0)}, {"values": RunValues(kv_tokens=0)} | NO_ROWS),
    ("R03c", LATENT, RANKLESS | {"query": "bf16[3, 4, 192]"}, RANKLESS),
    ("R04a", SEPARATE, RANKLESS | {"query": "bf16[512]"}, RANKLESS),
    ("R05a", SEPARATE, RANKLESS | PACKED | {"query": "bf16[3, 768, 1]"}, RANKLESS | PACKED),
    ("R03b", LATENT, RANKLESS | {"query": "bf16[3]", "value": "bf16[3, 192]"}, {}),
    ("P08", SEPARATE, heads(5960) | {"query": "bf16[2, 47680]", "key": "bf16[2, 11920]", "value": "bf16[2, 11920]"},
     heads(5960) | {"query": "bf16[0, 47680]", "key": "bf16[0, 11920]", "value": "bf16[0, 11920]"}),
    ("P09", SEPARATE, WIDE4 | {"attention_metadata": None}, WIDE4 | entries(0, 0)),
    ("P09", SEPARATE, WIDE4 | entries(1, 0), WIDE4 | entries(2, 0)),
    ("P09", SEPARATE, WIDE4 | {"attention_metadata": None}, WIDE4),
    ("P10", SEPARATE, ROTARY_1040, ROTARY_1040 | {"do_rotary": 0}),
    ("P10", SEPARATE, ROTARY_1040 | {"cos_cache": "bf16[9, 0]", "sin_cache": "bf16[9, 0]"},
     ROTARY_1040 | {"query": "bf16[0, 8320]", "key": "bf16[0, 2080]", "value": "bf16[0, 2080]"}),
    ("L15", LATENT, {"num_heads": 0}, {"num_heads": 1, "query": "bf16[3, 192]"}),
    ("L13", SEPARATE, PACKED | {"num_heads": 0},
     PACKED | ONE_HEAD | {"query": "bf16[3, 192]"}),
    ("L16", LATENT, {"query": "bf16[3, 770]"}, {"query": "bf16"}),
    ("C01", SEPARATE, {"num_heads": 0},
     ONE_HEAD | {"query": "bf16[3, 64]", "key": "bf16[3, 64]", "value": "bf16[3, 64]"}),
    ("R16c", SEPARATE, TENSOR, TENSOR | {"key_cache": "?[5, 16, 2, 64]", "value_cache": "?[5, 16, 2, 64]"}),
    ("R16f", SEPARATE, CHANNEL | {"k_scale": "f32[64]"}, CHANNEL | OPEN_QUERY),
    ("R03f", LATENT, {"key": "bf16[3, 192, 1]"}, {}),
    ("R04d", SEPARATE, {"key": "bf16[3, 128, 1]"}, {}),
    ("R06a", SEPARATE, {"v_head_size": 65}, OPEN_QUERY | {"v_head_size": 64}),
    ("R06c", LATENT, {"scale": None}, OPEN_QUERY | {"scale": None}),
    ("I03", SEPARATE,
     heads(1032) | INT4 | {"key_cache": "u8[5, 16, 2, 516]", "value_cache": "u8[5, 16, 2, 516]"}, INT4 | OPEN_QUERY),
    ("R10", LATENT, {"block_table": "i32[2, 2, 1]"}, {}),
    ("R14f", SEPARATE, {"cos_cache": "bf16[22, 32]"}, {"cos_cache": "bf16"}),
    ("R14f", SEPARATE, {"sin_cache": "bf16[22, 32]"}, {"sin_cache": "bf16"}),
    ("R14f", SEPARATE, {"sin_cache": "bf16[?, 24]"}, {"sin_cache": "bf16[?, 32]"}),
    ("X05", SEPARATE, heads(0),
     heads(0) | {"query": "bf16[0, 0]", "key": "bf16[0, 0]", "value": "bf16[0, 0]", "key_cache": "bf16[5, 16, 2, d]"}),
    ("R14d", SEPARATE, heads(128, cos_cache="bf16[9, 72]", sin_cache="bf16[9, 72]"),
     heads(128, cos_cache="bf16[9, 64]", sin_cache="bf16[9, 64]")),
    ("R17", SEPARATE, {"k_cache_dtype": "float16"},
     {"k_cache_dtype": "float16", "key_cache": "?[5, 16, 2, 64]", "value_cache": "?[5, 16, 2, 64]"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "base", "bad", "good"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_boundary(rule: str, base: Base, bad: Change, good: Change) -> None:
    assert verdict(base, bad) == rule
    assert verdict(base, good) == "ok"


def declared(
    *attributes: Attribute, inputs: int = 12, outputs: tuple[TensorSpec | None, ...] | None = None
) -> str:
    given, specs = SEPARATE()
    node = Declaration.of(PagedAttentionAttributes(**given), PagedAttentionInputs(**specs))
    listed = attributes or node.attributes
    slots = (node.inputs + (None,) * 13)[:inputs]
    try:
        check_declaration(Declaration(listed, slots, node.outputs if outputs is None else outputs))
    except InvalidArgument as error:
        return error.rule
    return "ok"


HEADS, KV_HEADS = Attribute("num_heads", "INT", 8), Attribute("kv_num_heads", "INT", 2)


@pytest.mark.parametrize(
    ("found", "rule"),
    [
        (declared(HEADS, KV_HEADS), "ok"),
        (declared(HEADS), "L01"),
        (declared(KV_HEADS), "L01"),
        (declared(HEADS, KV_HEADS, HEADS), "L23"),
        (declared(HEADS, KV_HEADS, Attribute("", "INT", 1)), "L25"),
        (declared(HEADS, KV_HEADS, Attribute("scale", "MALFORMED")), "L25"),
        (declared(HEADS, Attribute("kv_num_heads", "FLOAT", 2.0)), "L02"),
        (declared(HEADS, KV_HEADS, Attribute("qk_output", "INT", 1)), "L03"),
        (declared(inputs=7), "L04"),
        (declared(inputs=18), "L04"),
        (declared(inputs=17), "ok"),
        (declared(outputs=()), "L05"),
        (declared(outputs=(None,)), "L24"),
    ],
)
def test_declared_nodes(found: str, rule: str) -> None:
    assert found == rule


def test_the_first_missing_attribute_is_the_one_that_ort_names() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_declaration(Declaration((), (TensorSpec("bfloat16"),) * 8, (TensorSpec("undefined"),)))
    assert (caught.value.rule, caught.value.subject) == ("L01", "kv_num_heads")


def test_every_rule_is_at_its_boundary_here() -> None:
    declared_only = {"L01", "L02", "L04", "L23", "L24", "L25"}
    assert {row[0] for row in ROWS} | declared_only == {rule.id for rule in all_rules()}


def test_rules_are_documented_once_each() -> None:
    rules = all_rules()
    assert len({rule.id for rule in rules}) == len(rules) == len({rule.anchor for rule in rules})
    for rule in rules:
        assert 10 < len(rule.statement) < 110
        assert "\n" not in rule.statement
        assert 29 <= rule.since <= rule.until <= 32


def test_kinds_cover_every_attribute() -> None:
    assert tuple(PagedAttentionAttributes.model_fields) == tuple(KINDS)


@pytest.mark.parametrize(
    ("rule", "base", "bad", "good"), ROWS[::9], ids=lambda value: value if isinstance(value, str) else ""
)
def test_errors_survive_pickling_and_say_what_to_do(rule: str, base: Base, bad: Change, good: Change) -> None:
    with pytest.raises(PagedSchemaError) as caught:
        decide(base, bad)
    error = caught.value
    again = pickle.loads(pickle.dumps(error))
    assert again == error
    assert type(again) is type(error)
    assert (again.rule, again.stage, again.subject) == (rule, error.stage, error.subject)
    assert rule in str(error)
    assert error.expected in str(error)
    assert "\n" not in str(error)


def test_float32_is_an_extension_by_name() -> None:
    _, inputs = LATENT()
    change = {
        name: spec.replace("bf16", "f32") for name, spec in inputs.items() if spec and spec.startswith("bf16")
    }
    assert verdict(LATENT, change) == "L07"
    assert verdict(LATENT, change | {"extensions": {"float32"}}) == "ok"
    assert verdict(LATENT, change | {"extensions": {"float64"}}) == "A03"


@pytest.mark.parametrize(
    "options", [{"ort": "1.28"}, {"ort": "1.33"}, {"ort": "x"}, {"provider": "tensorrt"}]
)
def test_unknown_targets(options: Change) -> None:
    assert verdict(LATENT, options) == "A03"


def test_patch_numbers_of_ort_are_ignored() -> None:
    assert decide(LATENT, {"ort": "1.31.1"}).ort == "1.31"


def test_webgpu_reads_the_presence_of_scale_and_lists_what_it_lacks() -> None:
    _, inputs = LATENT()
    specs = {name: spec.replace("bf16", "f16") for name, spec in inputs.items() if spec}
    change = specs | {"provider": "webgpu", "scale": 0.0}
    with pytest.raises(NotImplementedMode) as caught:
        decide(LATENT, change)
    assert caught.value.modes == ("mode latent", "narrower_v_head_size", "rotary_offset")
    assert verdict(LATENT, specs | {"provider": "webgpu", "scale": None}) == "R06c"
    assert verdict(LATENT, {"provider": "webgpu"}) == "N02"


NO_TABLES = {"cos_cache": None, "sin_cache": None}


@pytest.mark.parametrize(
    ("ort", "change", "modes"),
    [
        ("1.31", {"softcap": -1.0}, ("inactive_softcap",)),
        ("1.31", {"softcap": math.nan}, ("inactive_softcap",)),
        ("1.31", {"softcap": 1e-60}, ()),
        ("1.30", {"local_window_size": 0}, ("inactive_local_window",)),
        ("1.30", {"local_window_size": 2**32 - 1}, ()),
        ("1.31", {"local_window_size": 0}, ()),
        ("1.31", {"k_quant_type": "none"}, ("other_letter_case",)),
        ("1.31", {"v_cache_dtype": "Float16"}, ("other_letter_case",)),
        ("1.31", {"v_cache_dtype": "float16"}, ()),
        # What it lacks comes before the tables that it wants, and the shapes before both.
        ("1.31", NO_TABLES | {"softcap": 3.0}, ("softcap",)),
        ("1.31", NO_TABLES, "P01"),
        ("1.31", {"softcap": 3.0, "past_seqlens": "i32[7]"}, "R09b"),
    ],
)
def test_webgpu_goes_by_the_attributes_as_written(ort: str, change: dict[str, Any], modes: object) -> None:
    _, inputs = SEPARATE()
    specs = {name: spec.replace("bf16", "f16") for name, spec in inputs.items() if spec}
    given = specs | {"provider": "webgpu", "ort": ort} | change
    if modes == ():
        assert decide(SEPARATE, given).provider == "webgpu"
        return
    with pytest.raises((NotImplementedMode, InvalidArgument)) as caught:
        decide(SEPARATE, given)
    assert modes in (getattr(caught.value, "modes", None), caught.value.rule)


@pytest.mark.parametrize(
    ("base", "change", "rule"),
    [
        (LATENT, {"num_heads": 0, "query": "bf16"}, "C01"),
        (LATENT, {"query": "bf16[3, 0]"}, "R03f"),
        (SEPARATE, PACKED | {"kv_num_heads": 0}, "C02"),
        (SEPARATE, PACKED | {"query": "bf16[3, 1]"}, "L14"),
        (SEPARATE, {"num_heads": 2, "kv_num_heads": 2**63 - 1}, "C02"),
        (LATENT, {"key_cache": "bf16", "outputs": slots(3)}, "L18"),
        (LATENT, latent_heads(0, v_head_size=0), "ok"),
        (LATENT, {"values": RunValues(kv_tokens=0)}, "ok"),
        (
            LATENT,
            latent_heads(2048, v_head_size=2048, do_rotary=1, cos_cache="bf16[9, 8]", sin_cache="bf16[9, 8]"),
            "ok",
        ),
        (LATENT, {"cumulative_sequence_length": "i32[]"}, "R09a"),
        (
            SEPARATE,
            PACKED | {"num_heads": 2**32, "kv_num_heads": 2**31, "key": None, "value": "bf16[3, 128]"},
            "R05d",
        ),
        (
            SEPARATE,
            PACKED | {"num_heads": 2**32, "kv_num_heads": 2**31, "value": "bf16[3, 128]", "ort": "1.30"},
            "X06",
        ),
        (SEPARATE, OPEN_QUERY | {"num_heads": 2**31, "key": "bf16"}, "X07"),
        (SEPARATE, PACKED | {"num_heads": 2**32, "query": "bf16"}, "X07"),
        (LATENT, OPEN_QUERY | {"kv_num_heads": 2, "key": "bf16[3, 193]"}, "R07b"),
        (SEPARATE, {"key": None, "query": "bf16[3, 768]", "value": "bf16[3, 128, 1]"}, "R05c"),
        (
            SEPARATE,
            {
                "num_heads": 2**32 - 8,
                "key": "bf16[3, w]",
                "value": "bf16[3, w]",
                "key_cache": "bf16[5, 16, 2, d]",
            },
            "R08c",
        ),
    ],
)
def test_which_rule_decides(base: Base, change: Change, rule: str) -> None:
    assert verdict(base, change) == rule


@pytest.mark.parametrize(
    ("base", "change", "subject"),
    [
        (SEPARATE, {name: None}, name)
        for name in ("query", "key_cache", "cumulative_sequence_length", "past_seqlens", "block_table")
    ]
    + [
        (SEPARATE, {"sin_cache": None}, "sin_cache"),
        (SEPARATE, {"cos_cache": None}, "cos_cache"),
        (SEPARATE, {"q_norm_weight": "bf16[64]"}, "k_norm_weight"),
        (SEPARATE, {"k_norm_weight": "bf16[64]"}, "q_norm_weight"),
        (SEPARATE, {"outputs": PagedAttentionOutputs(output="f16")}, "output"),
        (SEPARATE, {"outputs": PagedAttentionOutputs(value_cache_out="f16")}, "value_cache_out"),
    ],
)
def test_the_subject_is_what_is_at_fault(base: Base, change: Change, subject: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decide(base, change)
    assert caught.value.subject == subject


def test_the_subject_of_a_malformed_attribute() -> None:
    for attribute, subject in (
        (Attribute("", "INT", 1), "attribute"),
        (Attribute("scale", "MALFORMED"), "scale"),
    ):
        node = Declaration(
            (HEADS, KV_HEADS, attribute), (TensorSpec("bfloat16"),) * 8, (TensorSpec("undefined"),)
        )
        with pytest.raises(InvalidArgument) as caught:
            check_declaration(node)
        assert (caught.value.rule, caught.value.subject) == ("L25", subject)


def test_limits_that_multiples_of_8_cannot_tell_apart() -> None:
    from paged_schema.rules import caches, select

    assert caches.MAX_INT4_HEAD == select.MAX_PROLOGUE_HEAD == 1024


def test_versions_of_the_rules_that_not_all_have() -> None:
    found = {rule.id: rule.versions for rule in all_rules() if rule.versions != "1.29 to 1.32"}
    late = dict.fromkeys(("R04g", "R05d", "R14f"), "1.31 to 1.32")
    assert found == late | dict.fromkeys(("I01", "I02", "I03"), "1.30 to 1.32") | {"P06": "1.30"}


@pytest.mark.parametrize(("scale", "got"), [(None, "nothing"), (0.0, 0.0)])
def test_a_scale_that_is_missing_is_told_from_one_that_is_0(scale: float | None, got: object) -> None:
    with pytest.raises(InvalidArgument, match="R06c") as caught:
        decide(LATENT, {"scale": scale})
    assert caught.value.got == got
