"""Single roundings: to T, in the rotary embedding, in the norm."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle.dtypes import BFLOAT16, FLOAT8, name_of, numpy_dtype, round_to
from paged_oracle.normalization import rms_norm, rms_norm_exact
from paged_oracle.rotary import rotate, rotate_exact

FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-400, max_value=400)


def nearest(value: float, dtype: np.dtype) -> float:
    """Round by searching the representable values around, ties to the even code."""
    width = np.uint8 if dtype == FLOAT8 else np.uint16
    base = np.array([abs(value)], np.float32).astype(dtype).view(width)[0]
    codes = [int(base) + step for step in (-2, -1, 0, 1, 2) if int(base) + step >= 0]
    found = [(float(np.array([code], width).view(dtype).astype(np.float64)[0]), code) for code in codes]
    exact = Fraction(abs(value))
    best = min((abs(Fraction(v) - exact), code % 2, v) for v, code in found if np.isfinite(v))
    return best[2] if value >= 0 else -best[2]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT8, np.dtype(np.float16)])
@given(value=FINITE, tie=st.integers(0, 255), nudge=st.sampled_from([0.0, 2.0**-40, -(2.0**-40)]))
@settings(deadline=None, max_examples=150)
def test_round_to_rounds_once(dtype: np.dtype, value: float, tie: int, nudge: float) -> None:
    near_tie = (1 + tie / 256) * (1 + nudge)
    for number in (value, near_tie, 2.0**-126 * near_tie if dtype == BFLOAT16 else near_tie):
        assert float(round_to(np.array([number]), dtype).astype(np.float64)[0]) == nearest(number, dtype)


def test_a_cast_through_float32_would_round_twice() -> None:
    beside_a_tie = np.array([1 + 2.0**-8 + 2.0**-40])
    assert float(round_to(beside_a_tie, BFLOAT16)[0]) == 1 + 2.0**-7
    assert float(beside_a_tie.astype(BFLOAT16)[0]) == 1.0


def test_round_to_keeps_what_has_no_size() -> None:
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e300])
    with np.errstate(over="ignore"):
        rounded = round_to(special, BFLOAT16).astype(np.float64)
    np.testing.assert_array_equal(rounded, [np.nan, np.inf, -np.inf, 0.0, np.inf])
    assert np.signbit(rounded[3])


def test_type_names_go_both_ways() -> None:
    for name in ("float16", "bfloat16", "float32", "int8", "uint8", "float8e4m3fn", "int32"):
        assert name_of(numpy_dtype(name)) == name
    assert name_of(np.dtype(np.int64)) == "int64"


def scalar_rotation(x1: float, x2: float, cos: float, sin: float, dtype: type) -> tuple[float, float]:
    """The rotation of one pair, written out with exact fractions."""

    def to(value: Fraction) -> Fraction:
        return Fraction(float(round_to(np.array([float(value)]), np.dtype(dtype)).astype(np.float64)[0]))

    a, b, c, s = (Fraction(v) for v in (x1, x2, cos, sin))
    if dtype == np.float16:
        return float(to(a * c - to(b * s))), float(to(b * c + to(a * s)))
    return float(to(to(a * c) - to(b * s))), float(to(to(b * c) + to(a * s)))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_rounds_step_by_step_in_t(dtype: type, interleaved: bool) -> None:
    rng = np.random.default_rng(5)
    heads = rng.standard_normal((4, 2, 24)).astype(dtype)
    angles = rng.random((4, 4)) * 6
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    rotated = rotate(heads, cos, sin, offset=8, interleaved=interleaved)
    kept = [*range(8), *range(16, 24)]
    assert rotated[..., kept].tobytes() == heads[..., kept].tobytes()
    for token in range(4):
        for head in range(2):
            for pair in range(4):
                one, two = (8 + 2 * pair, 9 + 2 * pair) if interleaved else (8 + pair, 12 + pair)
                x1, x2, c, s = (
                    float(v)
                    for v in (
                        heads[token, head, one],
                        heads[token, head, two],
                        cos[token, pair],
                        sin[token, pair],
                    )
                )
                expected = scalar_rotation(x1, x2, c, s, dtype)
                assert (float(rotated[token, head, one]), float(rotated[token, head, two])) == expected


@given(
    angle=st.floats(-1e4, 1e4), width=st.integers(1, 8), interleaved=st.booleans(), seed=st.integers(0, 999)
)
@settings(deadline=None, max_examples=50)
def test_exact_rotation_turns_back(angle: float, width: int, interleaved: bool, seed: int) -> None:
    heads = np.random.default_rng(seed).standard_normal((1, 3, 20))
    cos, sin = np.full((1, width), np.cos(angle)), np.full((1, width), np.sin(angle))
    there = rotate_exact(heads, cos, sin, offset=2, interleaved=interleaved)
    back = rotate_exact(there, cos, -sin, offset=2, interleaved=interleaved)
    np.testing.assert_allclose(back, heads, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(there), np.linalg.norm(heads), rtol=1e-12)


@pytest.mark.parametrize("size", [8, 32, 40, 128])
def test_norm_rounds_once_to_t(size: int) -> None:
    rng = np.random.default_rng(size)
    heads = rng.standard_normal((50, 2, size)).astype(ml_dtypes.bfloat16)
    weight = (1 + 0.1 * rng.standard_normal(size)).astype(ml_dtypes.bfloat16)
    exact = rms_norm_exact(heads.astype(np.float64), weight, 1e-6)
    by_hand = heads.astype(np.float64) / np.sqrt(
        (heads.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6
    )
    np.testing.assert_allclose(exact, by_hand * weight.astype(np.float64), rtol=1e-14)
    rounded = rms_norm(heads, weight, 1e-6)
    differing = np.count_nonzero(rounded != round_to(exact, BFLOAT16))
    # float32 on the way moves a value to the other side of a bfloat16 tie about once in 2^13.
    assert differing <= max(1, heads.size // 1000)
