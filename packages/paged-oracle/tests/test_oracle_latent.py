"""Absorbed attention is decomposed attention, and a grouped-query model fits a LATENT cache exactly."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import compare, paged_attention, tolerance
from paged_oracle.latent import GqaLatent, absorb, decomposed_attention, yarn_magnitude, yarn_scale
from paged_oracle.rotary import rotate_exact
from paged_schema import PagedAttentionAttributes

FLOAT32 = frozenset({"float32"})


def absorbed_and_decomposed(
    heads: int, nope: int, rope: int, rank: int, value: int, new: int, past: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run one sequence both ways on the same float32 numbers."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    context, scale = past + new, yarn_scale(nope + rope, factor=4.0)
    w_uk, w_uv = normal(heads, nope, rank) / math.sqrt(rank), normal(heads, value, rank) / math.sqrt(rank)
    q_nope, q_rope = normal(new, heads, nope), normal(new, heads, rope)
    latent, key_rope = normal(context, rank), normal(context, rope)
    angles = rng.random((context, rope // 2)) * 6
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    rotated_keys = rotate_exact(key_rope[:, None].astype(np.float64), cos, sin)[:, 0]
    rotated_queries = rotate_exact(q_rope.astype(np.float64), cos[past:], sin[past:])
    # The cache stores float32, so the reference gets the keys as it stores them.
    expected = decomposed_attention(
        q_nope, rotated_queries, latent, rotated_keys.astype(np.float32), w_uk, w_uv, scale=scale
    )

    weights = absorb(w_uk, w_uv)
    block_size = 16
    cache = np.zeros((-(-context // block_size), block_size, 1, rank + rope), np.float32)
    rows = cache.reshape(-1, rank + rope)
    rows[:past, :rank], rows[:past, rank:] = latent[:past], rotated_keys[:past]
    outputs = paged_attention(
        PagedAttentionAttributes(
            num_heads=heads,
            kv_num_heads=1,
            kv_cache_layout="LATENT",
            v_head_size=weights.v_head_size,
            rotary_offset=weights.v_head_size,
            do_rotary=1,
            scale=scale,
        ),
        {
            "query": weights.queries(q_nope, q_rope).astype(np.float32),
            "key": np.concatenate([latent[past:], key_rope[past:]], axis=1),
            "key_cache": cache,
            "cumulative_sequence_length": np.array([0, new], np.int32),
            "past_seqlens": np.array([past], np.int32),
            "block_table": np.arange(len(cache), dtype=np.int32)[None],
            "cos_cache": cos,
            "sin_cache": sin,
        },
        rounding="exact",
        extensions=FLOAT32,
    )
    return weights.outputs(outputs.output), expected


@given(
    heads=st.integers(1, 5),
    nope=st.integers(1, 20),
    value=st.integers(1, 20),
    new=st.integers(1, 9),
    past=st.integers(0, 150),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=30)
def test_absorbed_is_decomposed(heads: int, nope: int, value: int, new: int, past: int, seed: int) -> None:
    actual, expected = absorbed_and_decomposed(heads, nope, 16, 48, value, new, past, seed)
    # The absorbed query is rounded to float32 once, which moves logits by 2^-24 of their terms.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_absorbed_is_decomposed_at_576_512_64_with_128_heads() -> None:
    actual, expected = absorbed_and_decomposed(128, 128, 64, 512, 128, new=3, past=200, seed=1)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < 1e-6


def test_absorb_refuses_weights_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="heads and rank"):
        absorb(np.zeros((2, 3, 8)), np.zeros((2, 3, 9)))


def test_yarn_scale_of_deepseek_v3() -> None:
    magnitude = 0.1 * math.log(40) + 1
    assert yarn_scale(192, factor=40) == pytest.approx(magnitude**2 / math.sqrt(192), rel=1e-15)
    assert yarn_magnitude(1.0) == 1.0
    assert yarn_scale(64, factor=40, mscale_all_dim=0.0) == 0.125


def gqa_both_ways(
    latent: GqaLatent,
    dtype: np.dtype,
    seed: int,
    lengths: tuple[int, ...] = (3, 1),
    past: tuple[int, ...] = (0, 37),
) -> tuple[np.ndarray, np.ndarray]:
    """Append the cached tokens, then the new ones, as the model has it and embedded in LATENT rows."""
    rng = np.random.default_rng(seed)
    heads, kv, size = latent.num_heads, latent.kv_num_heads, latent.head_size
    block_size, blocks = 16, 8
    angles = np.outer(np.arange(64), 100.0 ** (-np.arange(latent.rotary_dim // 2) / latent.rotary_dim))
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    shared = {"block_table": rng.permutation(blocks).reshape(2, 4).astype(np.int32)}
    common = {"num_heads": heads, "do_rotary": 1, "scale": size**-0.5}
    model = PagedAttentionAttributes(kv_num_heads=kv, **common)
    embedded = PagedAttentionAttributes(
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=latent.v_head_size,
        rotary_offset=latent.rotary_offset,
        **common,
    )
    caches = [np.zeros((blocks, block_size, kv, size), dtype) for _ in range(2)]
    cache = np.zeros((blocks, block_size, 1, latent.head_size_latent), dtype)
    wide_cos, wide_sin = latent.tables(cos, sin)
    results = []
    for new, before in ((past, (0, 0)), (lengths, past)):
        tokens = sum(new)
        q, k, v = (
            rng.standard_normal((tokens, n * size), dtype=np.float32).astype(dtype) for n in (heads, kv, kv)
        )
        step = shared | {
            "cumulative_sequence_length": np.array([0, new[0], tokens], np.int32),
            "past_seqlens": np.array(before, np.int32),
        }
        plain = paged_attention(
            model,
            step
            | {"query": q, "key": k, "value": v, "key_cache": caches[0], "value_cache": caches[1]}
            | {"cos_cache": cos, "sin_cache": sin},
            extensions=FLOAT32,
        )
        wide = paged_attention(
            embedded,
            step
            | {"query": latent.queries(q), "key": latent.rows(k, v), "key_cache": cache}
            | {"cos_cache": wide_cos, "sin_cache": wide_sin},
            extensions=FLOAT32,
        )
        results.append((plain.output, latent.outputs(wide.output)))
    return results[-1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "latent",
    [GqaLatent(9, 3, 64), GqaLatent(4, 4, 16), GqaLatent(6, 2, 32, rotary_dim=16), GqaLatent(2, 1, 16)],
)
def test_gqa_embedded_in_latent_rows(latent: GqaLatent, dtype: type) -> None:
    expected, actual = gqa_both_ways(latent, np.dtype(dtype), seed=3)
    result = compare(actual, expected, tolerance=tolerance.one_unit(expected))
    # Both round the same rotation in T; only the order of float64 sums differs, far below one unit of T.
    assert result.outside == 0
    assert result.differing <= result.size // 1000


@pytest.mark.parametrize("sizes", [(3, 2, 16, 0), (0, 1, 16, 0), (2, 1, 16, 15), (2, 1, 16, 18)])
def test_gqa_latent_refuses_impossible_sizes(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GqaLatent(*sizes)


def test_no_tokens_give_no_rows() -> None:
    latent = GqaLatent(num_heads=4, kv_num_heads=2, head_size=8)
    none = np.zeros((0, 16), np.float16)
    assert latent.rows(none, none).shape == (0, 32)
    assert latent.queries(np.zeros((0, 32))).shape == (0, 4 * 32)
    assert latent.outputs(np.zeros((0, 4 * 16))).shape == (0, 32)
    weights = absorb(np.zeros((2, 4, 5)), np.zeros((2, 3, 5)))
    assert weights.queries(np.zeros((0, 2, 4)), np.zeros((0, 2, 6))).shape == (0, 2 * 11)
    assert weights.outputs(np.zeros((0, 2 * 5))).shape == (0, 2, 3)


@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        ("rows", [(3, 1), (3, 16)]),
        ("rows", [(3, 16), (1, 16)]),
        ("rows", [(3, 2, 8), (3, 2, 8)]),
        ("queries", [(3, 64)]),
        ("queries", [(96,)]),
        ("outputs", [(3, 32)]),
        ("tables", [(3, 5), (3, 5)]),
        ("tables", [(3, 4), (2, 4)]),
    ],
)
def test_gqa_latent_refuses_shapes_that_would_broadcast(method: str, shapes: list[tuple[int, ...]]) -> None:
    latent = GqaLatent(num_heads=4, kv_num_heads=2, head_size=8)
    with pytest.raises(ValueError, match="must be"):
        getattr(latent, method)(*(np.zeros(shape) for shape in shapes))


def test_shapes_of_an_absorbed_layer() -> None:
    weights = absorb(np.zeros((2, 4, 5)), np.zeros((2, 3, 5)))
    with pytest.raises(ValueError, match="reshape"):
        weights.outputs(np.zeros((3, 20)))
    nope, rope, latent, key_rope = (
        np.zeros((3, 2, 4)),
        np.zeros((3, 2, 6)),
        np.zeros((2, 5)),
        np.zeros((2, 6)),
    )
    with pytest.raises(ValueError, match="more than the context"):
        decomposed_attention(nope, rope, latent, key_rope, weights.w_uk, weights.w_uv, scale=1.0)
