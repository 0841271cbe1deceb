"""`strict=True` refuses, before anything is written, what ONNX Runtime leaves undefined."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import numpy as np
import pytest
from paged_oracle import OracleError, UndefinedInputError, paged_attention
from paged_oracle.testing import Case, make_case
from paged_schema import PagedAttentionAttributes


def ordinary(**options: object) -> Case:
    return make_case(new=[2, 3], past=[5, 20], num_heads=2, head_size=32, rotary_dim=16, **options)  # type: ignore[arg-type]


def assert_passes(attributes: PagedAttentionAttributes, inputs: Mapping[str, np.ndarray]) -> None:
    """A strict call refuses nothing, and gives and writes what one that is not strict does."""
    strict, plain = (
        paged_attention(attributes, {name: array.copy() for name, array in inputs.items()}, strict=strict)
        for strict in (True, False)
    )
    assert strict.output.tobytes() == plain.output.tobytes()
    assert strict.key_cache.tobytes() == plain.key_cache.tobytes()


BAD = [
    ("S01", {"cumulative_sequence_length": [1, 2, 5]}),
    ("S02", {"cumulative_sequence_length": [0, 6, 5]}),
    ("S03", {"cumulative_sequence_length": [0, 2, 4]}),
    ("S04", {"past_seqlens": [-1, 20]}),
    ("S05", {"past_seqlens": [5, 30]}),
    ("S05", {"past_seqlens": [5, 2**31 - 1]}),
    ("S06", {"block_table": [[0, -1], [1, 99]]}),
    ("S06", {"block_table": [[-2, -1], [1, 2]]}),
    ("S06", {"block_table": [[0, -1], [-1, 2]]}),
    ("S09", {"slot_mapping": [0, 1, 2, 3, 3]}),
    ("S09", {"block_table": [[0, -1], [0, 0]], "past_seqlens": [5, 4]}),
    ("S10", {"slot_mapping": [0, 1, 2, 3, 4096]}),
    ("S11", {"attention_metadata": [2, 99]}),
    ("S11", {"attention_metadata": [0, 22]}),
    ("S11", {"attention_metadata": [0, 0, 24]}),
]


@pytest.mark.parametrize(("rule", "change"), BAD)
def test_undefined_values_are_refused_and_nothing_is_written(rule: str, change: dict[str, list[int]]) -> None:
    case = ordinary()
    inputs = case.fresh() | {name: np.array(value, np.int32) for name, value in change.items()}
    with pytest.raises(UndefinedInputError) as caught:
        paged_attention(case.attributes, inputs, strict=True)
    assert caught.value.rule == rule
    assert inputs["key_cache"].tobytes() == case.inputs["key_cache"].tobytes()
    paged_attention(case.attributes, inputs)


def test_rotary_tables_must_reach_the_last_position() -> None:
    case = ordinary()
    inputs = case.fresh()
    for name in ("cos_cache", "sin_cache"):
        inputs[name] = inputs[name][:22]
    with pytest.raises(UndefinedInputError) as caught:
        paged_attention(case.attributes, inputs, strict=True)
    assert caught.value.rule == "S07"


def test_caches_must_not_overlap() -> None:
    case = ordinary(layout="SEPARATE")
    inputs = case.fresh()
    inputs["value_cache"] = inputs["key_cache"]
    with pytest.raises(UndefinedInputError) as caught:
        paged_attention(case.attributes, inputs, strict=True)
    assert caught.value.rule == "cache-overlap"


def test_inputs_must_not_overlap_a_cache() -> None:
    case = ordinary(dtype="float16")
    inputs = case.fresh()
    inputs["query"] = inputs["key_cache"][0, :10].reshape(5, 64)
    with pytest.raises(UndefinedInputError) as caught:
        paged_attention(case.attributes, inputs, strict=True)
    assert (caught.value.rule, caught.value.subject) == ("cache-overlap", "query")


def test_caches_may_be_interleaved() -> None:
    case = ordinary(layout="SEPARATE")
    inputs = case.fresh()
    both = np.stack([inputs["key_cache"], inputs["value_cache"]], axis=1)
    inputs |= {"key_cache": both[:, 0], "value_cache": both[:, 1]}
    strict = paged_attention(case.attributes, inputs, strict=True)
    assert strict.output.tobytes() == paged_attention(case.attributes, case.fresh()).output.tobytes()


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scales_must_be_positive(scale: float) -> None:
    case = ordinary(cache_dtype="int8")
    inputs = case.fresh() | {"k_scale": np.array([scale], np.float32)}
    with pytest.raises(UndefinedInputError) as caught:
        paged_attention(case.attributes, inputs, strict=True)
    assert caught.value.rule == "S08"


@pytest.mark.parametrize("options", [{}, {"cache_dtype": "int8"}, {"layout": "SEPARATE"}])
def test_a_sound_call_passes_and_computes_the_same(options: dict[str, str]) -> None:
    case = ordinary(**options)
    assert_passes(case.attributes, case.fresh())


@pytest.mark.parametrize(
    "change",
    [
        {"block_table": [[0, -2], [1, 2]]},
        {"block_table": [[0, 99], [1, 2]]},
        {"slot_mapping": [0, 1, 2, 3, -2]},
    ],
)
def test_what_is_never_read_or_written_passes(change: dict[str, list[int]]) -> None:
    case = ordinary()
    assert_passes(
        case.attributes,
        case.fresh() | {name: np.array(value, np.int32) for name, value in change.items()},
    )


def test_true_bounds_pass() -> None:
    case = ordinary()
    assert_passes(case.attributes, case.fresh() | {"attention_metadata": np.array([3, 23, 23], np.int32)})


def test_old_blocks_outside_the_window_may_be_unmapped() -> None:
    case = make_case(new=[1], past=[40], num_heads=2, head_size=32, local_window_size=8)
    inputs = case.fresh()
    inputs["block_table"][0, :2] = -1
    assert_passes(case.attributes, inputs)


def test_the_error_travels() -> None:
    error = UndefinedInputError("S09", "slot_mapping", "slot 3 twice", "one token a slot")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rule, copy.subject, copy.got, copy.expected) == (
        "S09",
        "slot_mapping",
        "slot 3 twice",
        "one token a slot",
    )
    assert str(copy) == str(error)
    assert isinstance(copy, OracleError)
    assert isinstance(copy, ValueError)
