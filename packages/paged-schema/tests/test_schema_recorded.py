"""What the real CUDA operator of ORT 1.31.1 decided, row by row, and the contract's worked checks.

Each row of the record changes one thing in a base. The models declared every dimension symbolic unless the
row says fixed, so the load rules judge symbols and the run rules judge sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from paged_schema import (
    Call,
    InvalidArgument,
    PagedAttentionAttributes,
    PagedAttentionInputs,
    PagedAttentionOutputs,
    RunValues,
    TensorSpec,
    check,
)
from paged_schema.testing import bases

RECORD = Path(__file__).parents[3] / "tests-golden" / "invalid_inputs.json"
Change = Mapping[str, Any]


def outputs_of(inputs: PagedAttentionInputs, layout: str) -> PagedAttentionOutputs:
    caches = {"key_cache_out": inputs.key_cache}
    if layout == "SEPARATE" and inputs.value_cache is not None:
        caches["value_cache_out"] = inputs.value_cache
    if layout == "SEPARATE" and inputs.value_cache is None:
        # Such a model lists no second cache output either.
        return PagedAttentionOutputs(**caches, slot_count=2)
    return PagedAttentionOutputs(**caches)


def symbolic(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    def named(name: str, spec: TensorSpec | None) -> TensorSpec | None:
        if spec is None or spec.shape is None:
            return spec
        return TensorSpec(spec.dtype, tuple(f"{name}_{index}" for index in range(len(spec.shape))))

    return PagedAttentionInputs(
        **{name: named(name, getattr(inputs, name)) for name in type(inputs).model_fields}
    )


def decide(base: Callable[[], bases.Parts], change: Change, *, fixed: bool = False, **options: Any) -> Call:
    attributes, inputs = base()
    values = change.get("values")
    for name, value in change.items():
        if name in PagedAttentionAttributes.model_fields:
            attributes[name] = value
        elif name != "values":
            inputs[name] = value
    attributes = {name: value for name, value in attributes.items() if value is not None}
    model = PagedAttentionAttributes(**attributes)
    bound = PagedAttentionInputs(**inputs)
    outputs = outputs_of(bound, model.kv_cache_layout)
    declared = bound if fixed else symbolic(bound)
    return check(model, bound, declared=declared, outputs=outputs, values=values, sm=90, **options)


def stage_of(base: Callable[[], bases.Parts], change: Change, *, fixed: bool = False, **options: Any) -> str:
    try:
        decide(base, change, fixed=fixed, **options)
    except InvalidArgument as error:
        return {"load": "session", "build": "session", "run": "run", "select": "run"}[error.stage]
    return "accepted"


def metadata(*entries: int) -> Change:
    return {"attention_metadata": f"i32[{len(entries)}]", "values": RunValues(metadata=entries)}


INT8 = {"key_cache": "i8[5, 16, 1, 192]", "k_quant_type": "PER_TENSOR", "k_scale": "f32[1]"}
ROWS: dict[str, Change] = {
    "control LATENT (valid)": {},
    "control SEPARATE (valid)": {},
    "block_size 8": {"key_cache": "bf16[5, 8, 1, 192]"},
    "block_size 24": {"key_cache": "bf16[5, 24, 1, 192]"},
    "block_size 24 SEPARATE": {"key_cache": "bf16[5, 24, 2, 64]", "value_cache": "bf16[5, 24, 2, 64]"},
    "num_heads 4, kv_num_heads 3 SEPARATE": {"num_heads": 4, "kv_num_heads": 3},
    "value present with LATENT": {"value": "bf16[3, 192]"},
    "value_cache present with LATENT": {"value_cache": "bf16[5, 16, 1, 192]"},
    "no scale, v_head_size != head_size": {"scale": None},
    "scale = 0.0, v_head_size != head_size": {"scale": 0.0},
    "v_head_size 200 > head_size 192": {"v_head_size": 200},
    "v_head_size 100 (not a multiple of 8)": {"v_head_size": 100},
    "v_head_size 32 != head_size in SEPARATE": {"v_head_size": 32},
    "rotary_offset 4": {"rotary_offset": 4},
    "rotary_offset 136 + rotary_dim 64 > 192": {"rotary_offset": 136},
    "rotary_dim 40 (not a multiple of 16)": {"cos_cache": "bf16[21, 20]", "sin_cache": "bf16[21, 20]"},
    "cos_cache only": {"sin_cache": None},
    "do_rotary=0 with caches": {"do_rotary": 0},
    "cos_cache shorter than the sequences": {"cos_cache": "bf16[2, 32]", "sin_cache": "bf16[2, 32]"},
    "head_size 196 (not a multiple of 8)": {
        "query": "bf16[3, 784]",
        "key": "bf16[3, 196]",
        "key_cache": "bf16[5, 16, 1, 196]",
    },
    "query rank 3": {"query": "bf16[3, 4, 192]"},
    "key_cache rank 3": {"key_cache": "bf16[5, 16, 192]"},
    "key_cache last dim 128": {"key_cache": "bf16[5, 16, 1, 128]"},
    "past_seqlens wrong length": {"past_seqlens": "i32[3]"},
    "cumulative_sequence_length length 1": {"cumulative_sequence_length": "i32[1]"},
    "block_table wrong batch": {"block_table": "i32[3, 2]"},
    "slot_mapping wrong length": {"slot_mapping": "i32[4]"},
    "slot_mapping rank 2": {"slot_mapping": "i32[3, 1]"},
    "head_sink with LATENT": {"head_sink": "bf16[4]"},
    "head_sink wrong length SEPARATE": {"head_sink": "bf16[4]"},
    "only q_norm_weight SEPARATE": {"q_norm_weight": "bf16[64]"},
    "q_norm_weight wrong length SEPARATE": {"q_norm_weight": "bf16[32]", "k_norm_weight": "bf16[64]"},
    "k_scale without k_quant_type": {"k_scale": "f32[1]"},
    "k_quant_type PER_TENSOR on bf16 cache": {"k_quant_type": "PER_TENSOR", "k_scale": "f32[1]"},
    "int8 cache without quant type": {"key_cache": "i8[5, 16, 1, 192]"},
    "int8 cache, PER_TENSOR, k_scale of 2": INT8 | {"k_scale": "f32[2]"},
    "int8 cache, PER_CHANNEL, wrong shape": INT8
    | {"k_quant_type": "PER_CHANNEL", "k_scale": "f32[1, 1, 128]"},
    'k_quant_type "BAD"': {"k_quant_type": "BAD"},
    "v_quant_type with LATENT int8": INT8 | {"v_quant_type": "PER_TENSOR"},
    'k_cache_dtype "int8" on bf16 cache': {"k_cache_dtype": "int8"},
    'kv_cache_layout "BAD"': {"kv_cache_layout": "BAD"},
    "attention_metadata shape (4)": metadata(1, 2, 3, 4),
    "attention_metadata negative": metadata(-1, 22),
    "attention_metadata lower bound > bound": metadata(2, 22, 23),
    "value_cache absent SEPARATE": {"value_cache": None},
    "value_cache other block_size SEPARATE": {"value_cache": "bf16[5, 32, 2, 64]"},
    "key without value SEPARATE": {"value": None},
    "local_window_size 0 LATENT": {"local_window_size": 0},
    "zero query tokens LATENT": {"query": "bf16[0, 768]", "key": "bf16[0, 192]"},
    "past + new tokens beyond the block table (LATENT)": {"block_table": "i32[2, 1]"},
    "key without value SEPARATE, fixed shapes": {"value": None},
    "value without key SEPARATE, fixed shapes": {"key": None},
    "packed QKV width not a multiple of (num_heads+2*kv_num_heads), fixed shapes": {
        "query": "bf16[3, 770]",
        "key": None,
        "value": None,
    },
    "packed QKV (valid), fixed shapes": {"query": "bf16[3, 768]", "key": None, "value": None},
    "head_sink, block_size 16, prefill (MemoryEfficientAttention) SEPARATE": {"head_sink": "bf16[8]"},
    "is_causal=0, block_size 16 SEPARATE": {"is_causal": 0},
    "head_size 264 SEPARATE": {
        "query": "bf16[3, 2112]",
        "key": "bf16[3, 528]",
        "value": "bf16[3, 528]",
        "key_cache": "bf16[5, 16, 2, 264]",
        "value_cache": "bf16[5, 16, 2, 264]",
        "do_rotary": 0,
        "cos_cache": None,
        "sin_cache": None,
    },
    "head_size 2048, v_head_size 2048 LATENT": {
        "query": "bf16[3, 8192]",
        "key": "bf16[3, 2048]",
        "key_cache": "bf16[5, 16, 1, 2048]",
        "v_head_size": 2048,
    },
    # Values as wide as the keys: 8192 with values of 128 fits the shared memory, and ORT takes it.
    "head_size 8192 LATENT (shared memory)": {
        "query": "bf16[3, 32768]",
        "key": "bf16[3, 8192]",
        "key_cache": "bf16[5, 16, 1, 8192]",
        "v_head_size": 8192,
    },
}


def test_every_recorded_row_is_here() -> None:
    assert {row["case"] for row in json.loads(RECORD.read_text())} == set(ROWS)


@pytest.mark.parametrize("row", json.loads(RECORD.read_text()), ids=lambda row: row["case"])
def test_recorded_row(row: dict[str, str]) -> None:
    base = {"LATENT": bases.latent, "SEPARATE": bases.separate}[row["layout"]]
    assert stage_of(base, ROWS[row["case"]], fixed="fixed" in row["case"]) == row["stage"]


def rule_of(base: Callable[[], bases.Parts], change: Change, **options: Any) -> str:
    try:
        decide(base, change, **options)
    except InvalidArgument as error:
        return error.rule
    return "accepted"


def head(size: int, width: int, *, heads: int = 8) -> Change:
    return {
        "query": f"bf16[3, {heads * size}]",
        "key": f"bf16[3, {2 * size}]",
        "value": f"bf16[3, {2 * size}]",
        "key_cache": f"bf16[5, 16, 2, {size}]",
        "value_cache": f"bf16[5, 16, 2, {size}]",
        "cos_cache": f"bf16[21, {width}]",
        "sin_cache": f"bf16[21, {width}]",
    }


DEEPSEEK = {
    "query": "bf16[3, 2304]",
    "key": "bf16[3, 576]",
    "key_cache": "bf16[5, 16, 1, 576]",
    "v_head_size": 512,
    "rotary_offset": 512,
}
CODES = {"key_cache": "i8[5, 16, 2, 64]", "value_cache": "i8[5, 16, 2, 64]"}


@pytest.mark.parametrize(
    ("base", "change", "rule"),
    [
        (bases.separate, head(24, 8), "R14b"),
        (bases.separate, head(32, 24), "R14d"),
        (bases.separate, head(64, 12), "R14d"),
        (bases.latent, DEEPSEEK, "accepted"),
        (bases.latent, DEEPSEEK | {"scale": None}, "R06c"),
        (bases.latent, DEEPSEEK | {"scale": 0.0}, "R06c"),
        (bases.latent, DEEPSEEK | {"scale": None, "v_head_size": 576}, "accepted"),
        (
            bases.separate,
            CODES
            | {"k_quant_type": "PER_CHANNEL", "k_scale": "f32[2, 1, 64]"}
            | {"v_quant_type": "PER_TENSOR", "v_scale": "f32[1]"},
            "accepted",
        ),
        (bases.separate, CODES | {"k_quant_type": "PER_TENSOR", "k_scale": "f32[1]"}, "R16b"),
    ],
)  # fmt: skip
def test_worked_check(base: Callable[[], bases.Parts], change: Change, rule: str) -> None:
    assert rule_of(base, change) == rule


@pytest.mark.parametrize(
    ("ort", "rule"), [("1.29", "accepted"), ("1.30", "accepted"), ("1.31", "R04g"), ("1.32", "R04g")]
)
def test_unpacked_width_was_floored_before_1_31(ort: str, rule: str) -> None:
    change = {
        "num_heads": 4,
        "query": "bf16[3, 65]",
        "key": "bf16[3, 32]",
        "value": "bf16[3, 32]",
        "key_cache": "bf16[5, 16, 2, 16]",
        "value_cache": "bf16[5, 16, 2, 16]",
        "cos_cache": "bf16[21, 8]",
        "sin_cache": "bf16[21, 8]",
    }
    assert rule_of(bases.separate, change, ort=ort) == rule


def test_groups_scale_and_aliases_of_the_bases() -> None:
    separate = decide(bases.separate, {"num_heads": 4, "query": "bf16[3, 256]"})
    assert (separate.group_size, separate.head_size, separate.mode) == (2, 64, "separate")
    assert (separate.scale, separate.scale_source) == (0.125, "default")
    assert separate.aliases == (("key_cache", "key_cache_out"), ("value_cache", "value_cache_out"))
    latent = decide(bases.latent, {})
    assert (latent.mode, latent.head_size, latent.v_head_size, latent.rotary_dim) == ("latent", 192, 128, 64)
    assert latent.scale_source == "attribute"
    assert math.isclose(latent.scale, 192**-0.5, rel_tol=1e-7)
    assert latent.aliases == (("key_cache", "key_cache_out"),)
    assert (latent.tokens, latent.batch, latent.num_blocks, latent.block_size, latent.max_blocks) == (
        3,
        2,
        5,
        16,
        2,
    )
