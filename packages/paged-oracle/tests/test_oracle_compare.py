"""Comparisons name the error and the place; tolerances follow their error models."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import Coordinate, UnusableArrayError, compare, paged_attention, tolerance
from paged_oracle.dtypes import BFLOAT16, round_to
from paged_oracle.resolve import resolve
from paged_oracle.sequences import Sequences
from paged_oracle.testing import make_case


def test_equal_results() -> None:
    values = np.array([[1.0, np.nan, np.inf, 0.0]])
    result = compare(values, values * np.array([1, 1, 1, -1]))
    assert (result.differing, result.outside, result.first) == (0, 0, None)
    assert (result.max_abs, result.max_rel, result.rel_norm) == (0.0, 0.0, 0.0)
    assert "0 of 4 differ" in str(result)


def test_errors_are_measured() -> None:
    result = compare(np.array([[3.0, 0.0]]), np.array([[2.0, 0.0]]))
    assert (result.max_abs, result.max_rel, result.rel_norm) == (1.0, 0.5, 0.5)
    assert result.cosine == pytest.approx(0.0, abs=1e-15)
    assert compare(np.array([[0.0, 1.0]]), np.array([[1.0, 0.0]])).cosine == 1.0
    assert result.max_units is None


def test_a_wrong_nan_is_an_infinite_error() -> None:
    result = compare(np.array([[1.0, np.nan]]), np.array([[1.0, 2.0]]), tolerance=1e9)
    assert (result.outside, result.max_abs, result.max_rel) == (1, np.inf, np.inf)


def test_against_zero() -> None:
    result = compare(np.array([[1.0]]), np.array([[0.0]]))
    assert (result.max_rel, result.rel_norm, result.cosine) == (np.inf, np.inf, 1.0)
    assert compare(np.zeros((0, 4)), np.zeros((0, 4))).size == 0
    assert compare(np.zeros((1, 4)), np.zeros((1, 4))).cosine == 0.0


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    heads=st.integers(1, 3),
    data=st.data(),
)
@settings(deadline=None, max_examples=50)
def test_the_first_difference_is_named(lengths: list[int], heads: int, data: st.DataObject) -> None:
    channels, tokens = 5, sum(lengths)
    sequence = data.draw(st.sampled_from([b for b, n in enumerate(lengths) if n]))
    token = data.draw(st.integers(0, lengths[sequence] - 1))
    head, channel = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(0, channels - 1))
    expected = np.zeros((tokens, heads * channels))
    actual = expected.copy()
    row = sum(lengths[:sequence]) + token
    actual[row, head * channels + channel] = 1
    actual[row + 1 :] = 1
    cumulative = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    place = compare(actual, expected, num_heads=heads, cumulative=cumulative).first
    assert place == Coordinate(sequence, token, head, channel)


def test_a_row_of_no_sequence_is_named_as_such() -> None:
    result = compare(np.ones((3, 2)), np.zeros((3, 2)), cumulative=np.array([1, 3]))
    assert result.first == Coordinate(-1, 0, 0, 0)
    result = compare(np.array([[0.0], [0.0], [1.0]]), np.zeros((3, 1)), cumulative=np.array([0, 2]))
    assert result.first == Coordinate(-1, 2, 0, 0)


@pytest.mark.parametrize("bounds", [[0, 2, 1], [-5, 2, 99], [3, 1, 4], [0, 0, 4], [1, 2, 4]])
def test_a_sequence_is_named_as_the_oracle_reads_the_lengths(bounds: list[int]) -> None:
    case = make_case(new=[2, 2], past=[3, 3], num_heads=2, head_size=16)
    cumulative = np.array(bounds, np.int32)
    call = resolve(
        case.attributes, case.inputs | {"cumulative_sequence_length": cumulative}, "1.31", frozenset()
    )
    sequences = Sequences.build(call)
    for row, sequence in enumerate(sequences.sequence):
        actual = np.zeros((4, 1))
        actual[row] = 1
        token = row if sequence < 0 else row - sequences.starts[sequence]
        first = compare(actual, np.zeros((4, 1)), cumulative=cumulative).first
        assert first == Coordinate(sequence, token, 0, 0)


def test_the_largest_numbers_compare() -> None:
    result = compare(np.array([[1e308, 1e308]]), np.array([[-1e308, 1e308]]))
    assert (result.differing, result.max_abs) == (1, np.inf)


def test_a_tolerance_moves_the_first_place() -> None:
    result = compare(np.array([[1.0, 2.0, 3.0]]), np.array([[1.1, 2.0, 4.0]]), tolerance=0.5)
    assert (result.differing, result.outside, result.first) == (2, 1, Coordinate(0, 0, 0, 2))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_units_count_representable_values(dtype: type) -> None:
    expected = np.array([[1.0, 0.0, -2.0]]).astype(dtype)
    bits = expected.view(np.uint16).copy()
    bits += np.array([3, 1, 2], np.uint16)
    assert compare(bits.view(dtype), expected).max_units == 3
    across = np.array([[-0.0]]).astype(dtype).view(np.uint16) + np.uint16(2)
    assert compare(across.view(dtype), np.zeros((1, 1), dtype)).max_units == 2


@pytest.mark.parametrize(
    ("left", "right", "heads"),
    [((2, 4), (2, 5), 1), ((4,), (4,), 1), ((2, 5), (2, 5), 2), ((2, 4), (2, 4), 0), ((2, 4), (2, 4), -2)],
)
def test_shapes_must_match(left: tuple[int, ...], right: tuple[int, ...], heads: int) -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        compare(np.zeros(left), np.zeros(right), num_heads=heads)


@given(value=st.floats(2.0**-20, 60000.0), dtype=st.sampled_from([BFLOAT16, np.dtype(np.float16)]))
@settings(deadline=None, max_examples=100)
def test_one_unit_is_the_spacing(value: float, dtype: np.dtype) -> None:
    rounded = round_to(np.array([[value]]), dtype)
    above = (rounded.view(np.uint16) + np.uint16(1)).view(dtype).astype(np.float64)
    assert tolerance.one_unit(rounded)[0, 0] == above[0, 0] - rounded.astype(np.float64)[0, 0]


def test_the_unit_roundoffs() -> None:
    found = [tolerance.unit_roundoff(np.dtype(t)) for t in (np.float16, BFLOAT16, np.float32)]
    assert found == [2.0**-11, 2.0**-8, 2.0**-24]


def test_magnitude_is_the_output_of_positive_values_and_leaves_the_cache() -> None:
    case = make_case(new=[3], past=[40], num_heads=2, head_size=32, layout="SEPARATE", rotary_dim=16)
    inputs = case.fresh()
    found = tolerance.magnitude(case.attributes, inputs)
    assert inputs["value_cache"].tobytes() == case.inputs["value_cache"].tobytes()
    positive = case.fresh()
    for name in ("value", "value_cache"):
        positive[name] = np.abs(positive[name])
    expected = paged_attention(case.attributes, positive, rounding="ort").output.astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=2.0**-7)


def test_the_bounds_cover_the_worst_case_of_large_logits() -> None:
    """One key takes nearly all the weight and holds nothing; the other's logit is off by the most."""
    largest, keys = 1e4, 2
    value = 3.0

    def output(shift: float) -> float:
        weights = np.exp([-shift, -20.0 + shift])
        return float(weights[1] / weights.sum() * value)

    magnitudes = np.array([[output(0.0)]])
    for bound, shift in (
        (tolerance.float32_sums(magnitudes, 576, keys, largest), 576 * 2.0**-24 * largest),
        (tolerance.rounded_copies(magnitudes, np.dtype(np.float16), largest / 100), 2.0**-11 * largest / 100),
    ):
        assert output(shift) - output(0.0) <= bound[0, 0] <= 1.1 * (output(shift) - output(0.0))


def test_magnitude_of_an_idle_token_is_zero() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32, rotary_dim=16)
    inputs = case.fresh()
    for name in ("cos_cache", "sin_cache"):
        inputs[name] = inputs[name][:6]
    assert tolerance.magnitude(case.attributes, inputs).any(axis=1).tolist() == [True, True, False]


def test_magnitude_refuses_what_the_operator_refuses() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32)
    with pytest.raises(UnusableArrayError, match="key_cache"):
        tolerance.magnitude(case.attributes, case.inputs | {"key_cache": (1, 2)})  # type: ignore[dict-item]


def test_named_numbers() -> None:
    assert tolerance.onnxruntime_tests() == 5e-3
    assert tolerance.cache_codes() == 1
