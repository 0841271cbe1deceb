"""Codes of quantised caches, and what attention makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import paged_attention
from paged_oracle.dtypes import BFLOAT16, FLOAT8
from paged_oracle.quantization import Codec, expand_scale
from paged_oracle.testing import Case, make_case

INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)


def codec(dtype: np.dtype, scale: float, *, int4: bool = False, width: int = 4) -> Codec:
    return Codec(dtype, np.full((1, width), scale, np.float32), int4)


def encode(of: Codec, *values: float) -> np.ndarray:
    return of.encode(np.array(values, np.float32).reshape(1, 1, -1))[0, 0]


def test_int8_rounds_half_to_even_and_saturates() -> None:
    codes = encode(codec(INT8, 0.5), 0.25, 0.75, 1.25, -100.0)
    np.testing.assert_array_equal(codes, [0, 2, 2, -128])
    np.testing.assert_array_equal(encode(codec(INT8, 0.5), 63.6, -64.1, np.inf, np.nan), [127, -128, 127, 0])


def test_int8_and_float8_multiply_by_a_rounded_reciprocal() -> None:
    """In float32, 0.375 / 0.03 is the tie 12.5, which goes to 12; 0.375 * (1 / 0.03) lies above it."""
    assert encode(codec(INT8, 0.03), 0.375)[0] == 13
    assert encode(codec(FLOAT8, 0.03), 0.00146484375)[0] == 0.05078125


def test_int4_divides() -> None:
    """In float32, 1.3125 / 0.525 is the tie 2.5, which goes to 2; 1.3125 * (1 / 0.525) lies above it."""
    packed = encode(codec(UINT8, 0.525, int4=True, width=2), 1.3125, 0.0)
    np.testing.assert_array_equal(packed, [2 + 8 | 8 << 4])


def test_float8_saturates() -> None:
    codes = encode(codec(FLOAT8, 0.5), 1.0, 1e6, -1e6, np.nan).astype(np.float64)
    np.testing.assert_array_equal(codes, [2.0, 448.0, -448.0, 448.0])


def test_int4_clamps_then_rounds_and_packs_even_channels_low() -> None:
    packed = encode(codec(UINT8, 1.0, int4=True), -9.0, 7.5, 0.5, np.nan)
    np.testing.assert_array_equal(packed, [0 | 15 << 4, 8 | 0 << 4])


def test_int4_fills_the_missing_nibble_of_an_odd_width() -> None:
    packed = encode(codec(UINT8, 1.0, int4=True, width=3), 1.0, 2.0, 3.0)
    np.testing.assert_array_equal(packed, [9 | 10 << 4, 11 | 8 << 4])


@pytest.mark.parametrize(("dtype", "int4"), [(INT8, False), (FLOAT8, False), (UINT8, True)])
def test_a_zero_scale_stores_zero(dtype: np.dtype, int4: bool) -> None:
    of = codec(dtype, 0.0, int4=int4)
    with np.errstate(invalid="ignore"):
        rows = of.encode(np.array([[[1.0, -2.0, 3.0, np.inf]]], np.float32))
    out = np.full((1, 1, 4), 7.0)
    of.decode(rows, out)
    np.testing.assert_array_equal(out, 0)


def test_a_negative_scale_flips() -> None:
    np.testing.assert_array_equal(encode(codec(INT8, -0.5), 1.0, -1.0, 0.5, 0.0), [-2, 2, -1, 0])


@given(code=st.integers(0, 255), scale=st.floats(2.0**-10, 2.0**10, width=32))
@settings(deadline=None, max_examples=200)
def test_what_was_stored_is_stored_again(code: int, scale: float) -> None:
    for dtype, int4 in ((INT8, False), (FLOAT8, False), (UINT8, True)):
        row = np.array([[[code]]], np.uint8).view(dtype)
        of = codec(dtype, scale, int4=int4, width=2 if int4 else 1)
        if dtype == FLOAT8 and np.isnan(row.astype(np.float32)).any():
            continue
        out = np.zeros((1, 1, 2 if int4 else 1))
        of.decode(row, out)
        # "ort" encodes T; the product of a code and a scale is not one, so give it in float64.
        again = of.encode(out)
        if not (dtype == FLOAT8 and row.view(np.uint8)[0, 0, 0] == 0x80):
            assert again.tobytes() == row.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["int8", "float8e4m3fn", "uint8"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_new_tokens_are_read_back_from_their_codes(dtype: str, stored: str, per_channel: bool) -> None:
    """Attention over codes is attention over the decoded numbers in an unquantised cache."""
    case = make_case(
        new=[7, 1], past=[20, 33], layout="SEPARATE", kv_num_heads=2, dtype=dtype, cache_dtype=stored,
        per_channel=per_channel, rotary_dim=32, block_size=16,
    )  # fmt: skip
    outputs = paged_attention(case.attributes, case.inputs, rounding="exact")
    plain = decoded(case)
    expected = paged_attention(plain.attributes, plain.inputs, rounding="exact", extensions=plain.extensions)
    difference = np.abs(outputs.output.astype(np.float64) - expected.output.astype(np.float64))
    assert difference.max() < 2 ** (-8 if dtype == "bfloat16" else -11) * np.abs(expected.output).max()


def decoded(case: Case) -> Case:
    """The call after its writes: numbers instead of codes, and every token already in the cache."""
    inputs = case.fresh()
    attributes = case.attributes.model_copy(
        update={"k_quant_type": "NONE", "v_quant_type": "NONE", "k_cache_dtype": "", "v_cache_dtype": ""}
    )
    shape = (2, 64)
    for side in "kv":
        cache = inputs[f"{'key' if side == 'k' else 'value'}_cache"]
        of = Codec(cache.dtype, expand_scale(inputs.pop(f"{side}_scale"), *shape), cache.dtype == UINT8)
        rows = cache.reshape(-1, *cache.shape[2:])
        out = np.zeros((len(rows), *shape))
        of.decode(rows, out)
        inputs[f"{'key' if side == 'k' else 'value'}_cache"] = out.reshape(*cache.shape[:2], *shape).astype(
            np.float32
        )
    for name in ("query", "key", "value", "cos_cache", "sin_cache"):
        inputs[name] = inputs[name].astype(np.float32)
    inputs["slot_mapping"] = np.full(len(inputs["query"]), -1, np.int32)
    return Case(attributes, inputs, frozenset({"float32"}))


def test_a_plain_cache_stores_t() -> None:
    values = np.array([[[1.0, 2.5]]], BFLOAT16)
    assert Codec(BFLOAT16).encode(values).tobytes() == values.tobytes()
    assert Codec(BFLOAT16).encode(np.array([[[1 + 2.0**-8 + 2.0**-40, 2.5]]]))[0, 0, 0] == 1 + 2.0**-7
