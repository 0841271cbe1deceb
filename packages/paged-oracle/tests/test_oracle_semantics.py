"""Which keys a row sees, which slots a token writes, and what happens at the edges."""

from __future__ import annotations

import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from paged_oracle import Outputs, UndefinedInputError, paged_attention
from paged_oracle.backends import BackendName
from paged_oracle.product import THREADING_LIMIT, product
from paged_oracle.resolve import resolve
from paged_oracle.sequences import Sequences
from paged_oracle.spread import MOST_THREADS, cores, spread
from paged_oracle.testing import Case, make_case, pieces
from paged_oracle.tiles import Tile, tiles
from paged_schema import PagedAttentionAttributes

FLOAT32 = frozenset({"float32"})


def indicator(
    *,
    past: int,
    new: int,
    slots: list[int] | None = None,
    table: list[int] | None = None,
    cached: float = 1.0,
    backend: BackendName | None = None,
    **attributes: int | float,
) -> Outputs:
    """One head, equal logits, a value of 1 in channel p at position p: an output row is its visible set."""
    size, block_size, blocks = 64, 16, 4
    value_cache = np.zeros((blocks, block_size, 1, size), np.float32)
    rows = table or [0, 1, 2]
    for position in range(min(past + new, len(rows) * block_size)):
        block = rows[position // block_size]
        if 0 <= block < blocks:
            value_cache[block, position % block_size, 0, position] = cached
    value = np.zeros((new, size), np.float32)
    value[np.arange(new), past + np.arange(new)] = 1.0
    inputs = {
        "query": np.zeros((new, size), np.float32),
        "key": np.zeros((new, size), np.float32),
        "value": value,
        "key_cache": np.zeros((blocks, block_size, 1, size), np.float32),
        "value_cache": value_cache,
        "cumulative_sequence_length": np.array([0, new], np.int32),
        "past_seqlens": np.array([past], np.int32),
        "block_table": np.array([rows], np.int32),
    }
    if slots is not None:
        inputs["slot_mapping"] = np.array(slots, np.int32)
    node = PagedAttentionAttributes(num_heads=1, kv_num_heads=1, **attributes)
    return paged_attention(node, inputs, extensions=FLOAT32, backend=backend)


def seen(outputs: Outputs) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in outputs.output]


def test_a_row_sees_its_past_and_itself() -> None:
    assert seen(indicator(past=3, new=2)) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_a_window_counts_the_current_token() -> None:
    assert seen(indicator(past=3, new=2, local_window_size=2)) == [[2, 3], [3, 4]]
    assert seen(indicator(past=3, new=2, local_window_size=1)) == [[3], [4]]
    assert seen(indicator(past=3, new=2, local_window_size=0)) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_non_causal_sees_later_tokens_and_keeps_the_left_bound() -> None:
    assert seen(indicator(past=3, new=2, is_causal=0)) == [[0, 1, 2, 3, 4]] * 2
    assert seen(indicator(past=3, new=2, is_causal=0, local_window_size=2)) == [[2, 3, 4], [3, 4]]


def test_a_token_that_is_not_written_meets_the_old_content() -> None:
    outputs = indicator(past=3, new=2, slots=[-1, 4], cached=9.0)
    np.testing.assert_allclose(outputs.output[0, :5], [9 / 4, 9 / 4, 9 / 4, 9 / 4, 0])
    np.testing.assert_allclose(outputs.output[1, :5], [9 / 5, 9 / 5, 9 / 5, 9 / 5, 1 / 5], rtol=1e-6)


@pytest.mark.parametrize("unmapped", [-1, -7, 4, 2**31 - 1, -(2**31)])
def test_an_unmapped_block_is_skipped(unmapped: int) -> None:
    outputs = indicator(past=33, new=1, table=[0, unmapped, 2])
    assert seen(outputs) == [[*range(16), 32, 33]]
    np.testing.assert_allclose(outputs.lse, np.log(18), rtol=1e-6)


def test_a_backend_that_gathers_counts_an_unmapped_block_as_zeros() -> None:
    outputs = indicator(past=33, new=1, table=[0, -1, 2], backend="memory-efficient")
    assert seen(outputs) == [[*range(16), 32, 33]]
    np.testing.assert_allclose(outputs.lse, np.log(34), rtol=1e-6)


def test_a_token_without_a_block_is_not_written_and_sees_the_rest() -> None:
    outputs = indicator(past=33, new=1, table=[0, 1, -1])
    assert seen(outputs) == [[*range(32)]]


def test_positions_beyond_the_table_are_skipped() -> None:
    outputs = indicator(past=47, new=3, table=[0, 1, 2])
    assert seen(outputs) == [[*range(48)]] * 3


def test_a_row_that_sees_nothing_is_zero() -> None:
    outputs = indicator(past=3, new=1, table=[-1, -1])
    assert not outputs.output.any()
    assert np.isneginf(outputs.lse).all()


@pytest.mark.parametrize("slot", [-1, -5, 64, 2**31 - 1])
def test_a_slot_outside_the_cache_is_not_written(slot: int) -> None:
    outputs = indicator(past=0, new=1, slots=[slot], cached=5.0)
    assert np.count_nonzero(outputs.value_cache) == 1
    assert outputs.output[0, 0] == 5.0


def test_heads_share_kv_heads_in_order() -> None:
    case = make_case(new=[1], past=[0], layout="SEPARATE", num_heads=4, kv_num_heads=2, dtype="float32")
    outputs = paged_attention(case.attributes, case.inputs, extensions=FLOAT32)
    value = case.inputs["value"].reshape(2, 64)
    np.testing.assert_array_equal(outputs.output.reshape(4, 64), value[[0, 0, 1, 1]])


def test_lse_is_the_natural_log_of_the_denominator() -> None:
    case = make_case(new=[2], past=[9], num_heads=2, head_size=16, dtype="float32")
    outputs = paged_attention(case.attributes, case.inputs, rounding="exact", extensions=FLOAT32)
    keys = case.inputs["key_cache"][case.inputs["block_table"][0, 0], :11, 0].astype(np.float64)
    logits = case.inputs["query"].reshape(2, 2, 16).astype(np.float64) @ keys.T * np.float64(np.float32(0.25))
    np.testing.assert_allclose(outputs.lse[1], np.log(np.exp(logits[1]).sum(-1)), rtol=1e-13)
    np.testing.assert_allclose(outputs.lse[0], np.log(np.exp(logits[0, :, :10]).sum(-1)), rtol=1e-13)
    assert outputs.lse.dtype == np.float64


def test_a_sink_takes_part_in_the_denominator_only() -> None:
    case = make_case(
        new=[1], past=[5], layout="SEPARATE", kv_num_heads=2, head_size=16, dtype="float32", sink=True
    )
    sunk = paged_attention(case.attributes, case.fresh(), rounding="exact", extensions=FLOAT32)
    inputs = case.fresh()
    sink = inputs.pop("head_sink").astype(np.float64)
    plain = paged_attention(case.attributes, inputs, rounding="exact", extensions=FLOAT32)
    share = 1 / (1 + np.exp(sink - plain.lse))
    expected = plain.output.reshape(1, 4, 16) * share[..., None]
    np.testing.assert_allclose(sunk.output.reshape(1, 4, 16), expected, rtol=1e-6)
    np.testing.assert_allclose(sunk.lse, np.logaddexp(plain.lse, sink), rtol=1e-13)


def test_zero_length_sequences_are_passed_over() -> None:
    case = make_case(new=[0, 2, 0], past=[7, 4, 0], num_heads=2, head_size=16)
    outputs = paged_attention(case.attributes, case.inputs)
    assert outputs.output.shape == (2, 32)
    assert np.isfinite(outputs.lse).all()


def test_no_tokens_at_all() -> None:
    case = make_case(new=[0], past=[7], num_heads=2, head_size=16)
    before = case.inputs["key_cache"].tobytes()
    outputs = paged_attention(case.attributes, case.inputs)
    assert outputs.output.shape == (0, 32)
    assert outputs.lse.shape == (0, 2)
    assert outputs.key_cache.tobytes() == before


def test_an_empty_block_table_and_an_empty_cache() -> None:
    case = make_case(new=[2], past=[0], num_heads=2, head_size=16)
    inputs = case.inputs | {"block_table": np.zeros((1, 0), np.int32)}
    assert not paged_attention(case.attributes, inputs).output.any()
    inputs = case.inputs | {"key_cache": np.zeros((0, 16, 1, 16), ml_dtypes.bfloat16)}
    assert not paged_attention(case.attributes, inputs).output.any()


def test_garbage_that_a_row_does_not_see_does_not_reach_it() -> None:
    """NaN in unwritten slots, and in a later token's value, stays there."""
    case = make_case(new=[4], past=[3], layout="SEPARATE", kv_num_heads=1, dtype="float32")
    clean = paged_attention(case.attributes, case.fresh(), extensions=FLOAT32)
    dirty = case.fresh()
    block = dirty["block_table"][0, 0]
    for name in ("key_cache", "value_cache"):
        cache = dirty[name]
        spared = cache[block, :3].copy()
        cache[...] = np.nan
        cache[block, :3] = spared
    dirty["value"][3] = np.nan
    outputs = paged_attention(case.attributes, dirty, extensions=FLOAT32)
    assert outputs.output[:3].tobytes() == clean.output[:3].tobytes()
    assert np.isnan(outputs.output[3]).all()


def test_nan_and_infinity_in_the_query_stay_in_their_row() -> None:
    case = make_case(new=[3], past=[3], num_heads=2, head_size=16)
    clean = paged_attention(case.attributes, case.fresh())
    dirty = case.fresh()
    dirty["query"][1, :16] = np.nan
    outputs = paged_attention(case.attributes, dirty)
    assert np.isnan(outputs.output[1, :16].astype(np.float32)).all()
    kept = [0, 2]
    assert outputs.output[kept].tobytes() == clean.output[kept].tobytes()
    assert outputs.output[1, 16:].tobytes() == clean.output[1, 16:].tobytes()


def test_caches_of_any_strides_are_updated_in_place() -> None:
    case = make_case(new=[3], past=[20], num_heads=2, head_size=16)
    inputs = case.fresh()
    backing = np.zeros((*inputs["key_cache"].shape[:2], 1, 32), ml_dtypes.bfloat16)
    view = backing[::-1, :, :, ::2]
    view[...] = inputs["key_cache"]
    inputs["key_cache"] = view
    strided, plain = paged_attention(case.attributes, inputs), paged_attention(case.attributes, case.inputs)
    assert strided.key_cache is view
    assert strided.output.tobytes() == plain.output.tobytes()
    assert np.ascontiguousarray(view).tobytes() == plain.key_cache.tobytes()
    assert not backing[..., 1::2].any()


def test_rows_of_no_sequence_are_zero_and_not_written() -> None:
    case = make_case(new=[2, 2], past=[3, 3], num_heads=2, head_size=16)
    for bounds, idle in (([1, 2, 4], [0]), ([0, 2, 3], [3]), ([0, 2, 1], [2, 3]), ([-5, 2, 99], [])):
        inputs = case.fresh() | {"cumulative_sequence_length": np.array(bounds, np.int32)}
        outputs = paged_attention(case.attributes, inputs)
        assert np.flatnonzero(~outputs.output.astype(np.float32).any(axis=1)).tolist() == idle
        assert np.flatnonzero(np.isneginf(outputs.lse).all(axis=1)).tolist() == idle


def test_a_negative_past_silences_its_sequence() -> None:
    case = make_case(new=[2, 2], past=[3, 3], num_heads=2, head_size=16)
    inputs = case.fresh() | {"past_seqlens": np.array([-1, 3], np.int32)}
    inputs["slot_mapping"] = np.arange(4, dtype=np.int32)
    before = inputs["key_cache"].reshape(-1, 16)[:4].copy()
    outputs = paged_attention(case.attributes, inputs)
    after = outputs.key_cache.reshape(-1, 16)[:4]
    assert after[:2].tobytes() == before[:2].tobytes()
    assert after[2:].tobytes() == case.inputs["key"][2:].tobytes()
    assert not outputs.output[:2].any()


def test_a_position_without_a_rotary_row_is_idle() -> None:
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32, rotary_dim=16)
    inputs = case.fresh()
    for name in ("cos_cache", "sin_cache"):
        inputs[name] = inputs[name][:6]
    outputs = paged_attention(case.attributes, inputs)
    whole = paged_attention(case.attributes, case.fresh())
    assert outputs.output[:2].tobytes() == whole.output[:2].tobytes()
    assert not outputs.output[2].any()
    block = inputs["block_table"][0, 0]
    assert outputs.key_cache[block, 6].tobytes() == case.inputs["key_cache"][block, 6].tobytes()


@pytest.mark.parametrize("layout", ["LATENT", "SEPARATE"])
@pytest.mark.parametrize("rounding", ["ort", "exact"])
def test_rotary_tables_without_a_row_leave_every_token_idle(layout: str, rounding: str) -> None:
    case = make_case(new=[3, 1], past=[4, 0], num_heads=2, head_size=32, rotary_dim=16, layout=layout)
    inputs = case.fresh()
    for name in ("cos_cache", "sin_cache"):
        inputs[name] = inputs[name][:0]
    outputs = paged_attention(case.attributes, inputs, rounding=rounding)
    assert not outputs.output.any()
    assert np.isneginf(outputs.lse).all()
    assert outputs.key_cache.tobytes() == case.inputs["key_cache"].tobytes()


@pytest.mark.parametrize("shorter", ["cos_cache", "sin_cache"])
def test_the_shorter_rotary_table_decides(shorter: str) -> None:
    """ONNX Runtime before 1.31 takes tables of unequal length."""
    case = make_case(new=[3], past=[4], num_heads=2, head_size=32, rotary_dim=16)
    inputs = case.fresh()
    inputs[shorter] = inputs[shorter][:6]
    outputs = paged_attention(case.attributes, inputs, ort="1.30")
    assert outputs.output[:2].any(axis=1).all()
    assert not outputs.output[2].any()
    with pytest.raises(UndefinedInputError, match="6 rows"):
        paged_attention(case.attributes, inputs, ort="1.30", strict=True)


def test_a_past_beyond_everything_ends() -> None:
    case = make_case(new=[1], past=[4], num_heads=2, head_size=16)
    inputs = case.fresh() | {"past_seqlens": np.array([2**31 - 1], np.int32)}
    outputs = paged_attention(case.attributes, inputs)
    assert np.isfinite(outputs.lse).all()


@pytest.mark.parametrize("metadata", [[0, 0], [99, 99], [0, 0, 0], [9, 99, 1]])
def test_metadata_changes_nothing(metadata: list[int]) -> None:
    case = make_case(new=[3, 1], past=[4, 20], num_heads=2, head_size=16)
    plain = paged_attention(case.attributes, case.fresh())
    inputs = case.fresh() | {"attention_metadata": np.array(metadata, np.int32)}
    assert paged_attention(case.attributes, inputs).output.tobytes() == plain.output.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_two_arithmetics_agree_but_for_rounding(dtype: str) -> None:
    case = make_case(new=[5], past=[30], num_heads=2, head_size=64, rotary_dim=32, dtype=dtype)
    one, other = (
        paged_attention(case.attributes, case.fresh(), rounding=rounding, extensions=case.extensions)
        for rounding in ("ort", "exact")
    )
    wide = [outputs.output.astype(np.float64) for outputs in (one, other)]
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    error = np.linalg.norm(wide[0] - wide[1]) / np.linalg.norm(wide[1])
    assert 0 < error < 4 * unit


def test_a_ring_of_blocks_serves_a_window() -> None:
    """Old blocks of a sliding window are used again; the table stays indexed by absolute position."""
    window, block_size = 20, 16
    case = make_case(
        new=[100], past=[0], num_heads=2, head_size=16, dtype="float32", local_window_size=window
    )
    whole = paged_attention(case.attributes, case.fresh(), extensions=FLOAT32)
    ring = -(-window // block_size) + 1
    cache = np.zeros((ring, block_size, 1, 16), np.float32)
    rows = []
    for position, piece in enumerate(pieces(case, [1] * 100)):
        table = np.full((1, 7), -1, np.int32)
        for logical in range(max(0, position - window + 1) // block_size, position // block_size + 1):
            table[0, logical] = logical % ring
        piece |= {"key_cache": cache, "block_table": table}
        rows.append(paged_attention(case.attributes, piece, extensions=FLOAT32, strict=True).output)
    assert np.concatenate(rows).tobytes() == whole.output.tobytes()


def test_heads_without_channels() -> None:
    """ONNX Runtime lets a head size of 0 pass when there are no tokens."""
    case = make_case(new=[0], past=[3], layout="SEPARATE", num_heads=2, head_size=16)
    inputs = case.fresh()
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name][:, :0]
    for name in ("key_cache", "value_cache"):
        inputs[name] = inputs[name][..., :0]
    assert paged_attention(case.attributes, inputs).output.shape == (0, 0)


def test_memory_does_not_grow_with_the_context() -> None:
    peaks = []
    for past in (0, 20_000):
        case = make_case(new=[130], past=[past], num_heads=16, head_size=64, block_size=256)
        paged_attention(case.attributes, case.inputs)
        tracemalloc.start()
        paged_attention(case.attributes, case.inputs)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    tile = 8 * ((1024 + 16) * (3 * 128 + 64 + 3 * 64) + 3 * 128 * 64)
    rows = 4 * case.inputs["query"].nbytes
    assert max(peaks) < tile * min(cores(), MOST_THREADS) + rows


@pytest.mark.parametrize(
    ("heads", "kv_heads", "counts"),
    [(16, 1, [40]), (64, 4, [16, 16, 8]), (1024, 1024, [16, 16, 8]), (1024, 64, [1] * 40)],
)
def test_a_tile_fills_the_rows_that_its_heads_are_padded_to(
    heads: int, kv_heads: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paged_oracle.spread.cores", lambda: 1)
    case = make_case(
        new=[40], past=[9], layout="SEPARATE", num_heads=heads, kv_num_heads=kv_heads, head_size=16
    )
    bound = resolve(case.attributes, case.inputs, "1.31", frozenset())
    assert [tile.count for tile in tiles(bound.call, Sequences.build(bound))] == counts
    tracemalloc.start()
    paged_attention(case.attributes, case.inputs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows = 1024 + 16 * kv_heads
    tile = 8 * (rows * (3 * 128 + 16 + 3 * 16) + 3 * 128 * kv_heads * 16)
    assert peak < tile + 4 * case.inputs["query"].nbytes


@pytest.mark.parametrize(("inner", "columns"), [(576, 128), (128, 512), (128, 500), (1024, 1000), (8, 1)])
def test_no_product_is_large_enough_for_threads_of_blas(
    inner: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, matmul = [], np.matmul

    def spy(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        sizes.append(left.shape[-2] * left.shape[-1] * right.shape[-1])
        matmul(left, right, out=out)

    monkeypatch.setattr(np, "matmul", spy)
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, 32, inner)), rng.standard_normal((2, inner, columns))
    np.testing.assert_allclose(product(left, right), np.einsum("srk,skc->src", left, right), atol=1e-12)
    assert max(sizes, default=0) <= THREADING_LIMIT


def test_tiles_are_spread_over_threads_and_errors_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(0, slice(0, 64), 0, 0, 64, -1, True)
    for available in (1, 4):
        monkeypatch.setattr("paged_oracle.spread.cores", lambda available=available: available)
        names: set[str] = set()
        barrier = threading.Barrier(available)

        def work(_: Tile, names: set[str] = names, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(timeout=60)
            names.add(threading.current_thread().name)

        spread(work, [tile] * available, num_heads=16)
        assert len(names) == available

    def fail(_: Tile) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        spread(fail, [tile] * 4, num_heads=16)


def test_cores_are_counted_where_affinity_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert cores() >= 1


def test_case_is_fresh() -> None:
    case: Case = make_case(new=[1], past=[4], num_heads=2, head_size=16)
    paged_attention(case.attributes, case.fresh())
    again = make_case(new=[1], past=[4], num_heads=2, head_size=16)
    assert case.inputs["key_cache"].tobytes() == again.inputs["key_cache"].tobytes()
