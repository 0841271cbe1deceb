"""The strict layer: every value rule at its boundary, and nothing refused that is fine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_schema import Call, InvalidArgument, PagedAttentionAttributes, PagedAttentionInputs, check
from paged_schema.strict import STATEMENTS, check_values
from paged_schema.testing import bases

BLOCK = 16


def call_of(*, window: int = -1, blocks: int | str = 8, rows: int | str = 64, slots: bool = False) -> Call:
    attributes = PagedAttentionAttributes(
        num_heads=2, kv_num_heads=1, kv_cache_layout="LATENT", do_rotary=1, local_window_size=window
    )
    inputs = PagedAttentionInputs(
        query="bf16[tokens, 128]",
        key="bf16[tokens, 64]",
        key_cache=f"bf16[{blocks}, {BLOCK}, 1, 64]",
        cumulative_sequence_length="i32[bounds]",
        past_seqlens="i32[batch]",
        block_table="i32[batch, columns]",
        cos_cache=f"bf16[{rows}, 16]",
        sin_cache=f"bf16[{rows}, 16]",
        slot_mapping="i32[tokens]" if slots else None,
        attention_metadata="i32[3]",
    )
    return check(attributes, inputs)


def step() -> dict[str, np.ndarray]:
    """Three sequences: 2 new after 30, none after 40, 17 new after 0."""
    return {
        "query": np.zeros((19, 128), np.float16),
        "cumulative_sequence_length": np.array([0, 2, 2, 19], np.int32),
        "past_seqlens": np.array([30, 40, 0], np.int32),
        "block_table": np.array([[0, 1, -1], [-1, -1, -1], [2, 3, 99]], np.int32),
        "attention_metadata": np.array([17, 32, 32], np.int32),
    }


def rule_of(call: Call, arrays: dict[str, np.ndarray]) -> str | None:
    try:
        check_values(call, arrays)
    except InvalidArgument as error:
        assert error.stage == "run"  # noqa: PT017 - the rule is what the tests compare
        return error.rule
    return None


def test_a_good_step_passes_with_unused_entries_unmapped() -> None:
    assert rule_of(call_of(), step()) is None


@pytest.mark.parametrize(
    ("name", "index", "value", "rule"),
    [
        ("cumulative_sequence_length", 0, 1, "S01"),
        ("cumulative_sequence_length", 2, 1, "S02"),
        ("cumulative_sequence_length", 3, 18, "S03"),
        ("past_seqlens", 1, -1, "S04"),
        ("past_seqlens", 0, 46, None),
        ("past_seqlens", 0, 47, "S05"),
        ("block_table", (0, 1), -1, "S06"),
        ("block_table", (0, 1), 8, "S06"),
        ("block_table", (0, 1), 7, None),
        ("block_table", (0, 2), 8, None),
        ("block_table", (0, 1), 3, None),
        ("block_table", (2, 0), 0, None),
        ("block_table", (2, 1), 2, "S09"),
        ("attention_metadata", 0, 16, "S11"),
        ("attention_metadata", 1, 31, "S11"),
        ("attention_metadata", 2, 33, "S11"),
        ("attention_metadata", 0, 0, None),
        ("attention_metadata", 1, 0, None),
    ],
)
def test_one_changed_value(name: str, index: int, value: int, rule: str | None) -> None:
    arrays = step()
    arrays[name][index] = value
    if (name, value) == ("past_seqlens", 46):
        arrays["block_table"][0, 2] = 5
        arrays["attention_metadata"][1] = 0
    assert rule_of(call_of(), arrays) == rule


def test_two_sequences_may_not_write_one_slot() -> None:
    arrays = step()
    arrays["block_table"][0, 1] = 3
    arrays["past_seqlens"][0] = 16
    assert rule_of(call_of(), arrays) == "S09"


def test_blocks_before_the_window_may_be_unmapped() -> None:
    arrays = step()
    arrays["block_table"][0, 0] = -1
    assert rule_of(call_of(), arrays) == "S06"
    # The first query of sequence 0 is at position 30: a window of 15 reads from 16, one of 16 from 15.
    assert rule_of(call_of(window=15), arrays) is None
    assert rule_of(call_of(window=16), arrays) == "S06"


def test_rotary_tables_hold_every_position() -> None:
    assert rule_of(call_of(rows=32), step()) is None
    assert rule_of(call_of(rows=31), step()) == "S07"


@pytest.mark.parametrize(
    ("slots", "rule"),
    [
        (range(19), None),
        ([-1] * 19, None),
        ([*range(18), 127], None),
        ([*range(18), 128], "S10"),
        ([*range(18), 0], "S09"),
        (range(18), "S00"),
    ],
)
def test_slots(slots: list[int], rule: str | None) -> None:
    assert rule_of(call_of(slots=True), step() | {"slot_mapping": np.array(slots, np.int32)}) == rule


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_scales_are_finite_and_positive(value: float) -> None:
    assert rule_of(call_of(), {"k_scale": np.array([[1.0, value]], np.float32)}) == "S08"
    assert rule_of(call_of(), {"k_scale": np.array([[1.0, 0.5]], np.float32)}) is None


@pytest.mark.parametrize(
    "arrays",
    [
        {"past_seqlens": np.zeros(3, np.float32)},
        {"past_seqlens": np.zeros((3, 1), np.int32)},
        {"block_table": np.zeros(3, np.int32)},
        {"cumulative_sequence_length": np.zeros(1, np.int32)},
        {"cumulative_sequence_length": np.zeros(0, np.int32)},
        {"past_seqlens": np.zeros(2, np.int32)},
        {"block_table": np.zeros((2, 3), np.int32)},
        {"attention_metadata": np.zeros(4, np.int32)},
    ],
)
def test_an_array_that_is_not_what_the_call_says(arrays: dict[str, np.ndarray]) -> None:
    assert rule_of(call_of(), step() | arrays) == "S00"


def test_what_is_not_given_is_not_checked() -> None:
    full = step()
    for name in full:
        assert rule_of(call_of(blocks="blocks"), {k: v for k, v in full.items() if k != name}) is None
    assert rule_of(call_of(), {}) is None


def test_check_applies_it_only_when_asked() -> None:
    call = call_of()
    arrays = step()
    arrays["past_seqlens"][0] = -5
    check(call.attributes, call.inputs)
    with pytest.raises(InvalidArgument, match="S04"):
        check(call.attributes, call.inputs, strict=arrays)


def test_every_rule_has_a_statement() -> None:
    assert set(STATEMENTS) == {f"S{number:02d}" for number in range(12)}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=6))
def test_a_step_of_distinct_blocks_always_passes(sequences: list[tuple[int, int]]) -> None:
    lengths = [new for _, new in sequences]
    columns = 4
    arrays = {
        "cumulative_sequence_length": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "past_seqlens": np.array([past for past, _ in sequences], np.int32),
        "block_table": np.random.default_rng(0).permutation(len(sequences) * columns).reshape(-1, columns),
    }
    assert rule_of(call_of(blocks=len(sequences) * columns), arrays) is None


@pytest.mark.parametrize("short", ["cos_cache", "sin_cache"])
def test_both_rotary_tables_hold_every_position(short: str) -> None:
    attributes, inputs = bases.latent()
    call = check(attributes, inputs | {short: "bf16[20, 32]"}, ort="1.30")
    assert call.rotary_rows == 20
    steps = {"cumulative_sequence_length": np.array([0, 2, 3]), "past_seqlens": np.array([5, 20])}
    with pytest.raises(InvalidArgument, match="S07"):
        check_values(call, steps)
    open_rows = check(attributes, inputs | {short: "bf16[rows, 32]"})
    assert open_rows.rotary_rows == 21


@pytest.mark.parametrize(
    "arrays",
    [
        {"block_tables": np.zeros((3, 3), np.int32)},
        {3: np.zeros(3, np.int32)},
        {"past_seqlens": [30, 40, 0]},
        {"past_seqlens": np.array([30, 40, 2**63 - 1])},
        {"past_seqlens": np.array([30, 40, 2**32], np.uint64)},
        {"cumulative_sequence_length": np.array([0, 2, 2, -(2**40)])},
        {"key_cache": np.float32(1)},
        {"key_cache": np.zeros(())},
        {"cos_cache": np.zeros(())},
        {"k_scale": np.array(["a"])},
    ],
    ids=str,
)
def test_arrays_that_are_none_of_the_schemas(arrays: dict[str, np.ndarray]) -> None:
    assert rule_of(call_of(), step() | arrays) == "S00"


def test_tables_that_are_given_are_counted() -> None:
    call = call_of(rows="rows")
    assert rule_of(call, step()) is None
    assert rule_of(call, step() | {"cos_cache": np.zeros((32, 16))}) is None
    assert rule_of(call, step() | {"cos_cache": np.zeros((31, 16))}) == "S07"
    assert rule_of(call, step() | {"cos_cache": np.zeros((32, 16)), "sin_cache": np.zeros((31, 16))}) == "S07"
