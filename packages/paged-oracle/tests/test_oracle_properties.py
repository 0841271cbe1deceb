"""What must never change a result: paging, the batch, how a prefill is split, options at their limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_oracle import Outputs, compare, paged_attention, tolerance
from paged_oracle.softmax import RunningSoftmax
from paged_oracle.testing import Case, alone, make_case, pieces, place, repaged

# Drawing a case fills its arrays, which takes long on a busy machine.
BOUNDS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=1, max_size=4)


@st.composite
def cases(draw: st.DrawFn, *, sequences: int | None = None, **fixed: object) -> Case:
    """Any mode, type and option; ORT refuses a sink with LATENT, and INT4 with LATENT."""
    lengths = draw(LENGTHS) if sequences is None else draw(LENGTHS)[:sequences]
    if sum(new for new, _ in lengths) == 0:
        lengths = [(1, lengths[0][1]), *lengths[1:]]
    layout = fixed.get("layout") or draw(st.sampled_from(["LATENT", "SEPARATE"]))
    latent = layout == "LATENT"
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    quantised = ["int8", "float8e4m3fn"] if latent else ["int8", "float8e4m3fn", "uint8"]
    stored = draw(st.sampled_from([None, None, *quantised])) if dtype != "float32" else None
    options: dict[str, object] = {
        "new": [new for new, _ in lengths],
        "past": [past for _, past in lengths],
        "layout": layout,
        "dtype": dtype,
        "cache_dtype": stored,
        "per_channel": draw(st.booleans()),
        "num_heads": draw(st.sampled_from([4, 6])),
        "kv_num_heads": 1 if latent else draw(st.sampled_from([1, 2])),
        "head_size": 64,
        "v_head_size": draw(st.sampled_from([0, 24])) if latent else 0,
        "block_size": draw(st.sampled_from([16, 64, 256])),
        "rotary_dim": draw(st.sampled_from([0, 16, 32])),
        "rotary_offset": draw(st.sampled_from([0, 32])),
        "rotary_interleaved": draw(st.integers(0, 1)),
        "local_window_size": draw(st.sampled_from([-1, 1, 17, 100])),
        "softcap": draw(st.sampled_from([0.0, 5.0])),
        "packed": False if latent else draw(st.booleans()),
        "norm": False if latent else draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }
    return make_case(**{**options, **fixed})  # type: ignore[arg-type]


ROUNDINGS = st.sampled_from(["ort", "exact"])


def run(case: Case, rounding: str = "ort") -> Outputs:
    return paged_attention(case.attributes, case.fresh(), rounding=rounding, extensions=case.extensions)


def held(case: Case, outputs: Outputs) -> list[bytes]:
    """The bytes that each sequence holds at its positions."""
    contexts = case.inputs["past_seqlens"] + np.diff(case.inputs["cumulative_sequence_length"])
    table = case.inputs["block_table"]
    found = []
    for cache in (outputs.key_cache, outputs.value_cache):
        if cache is not None:
            found += [cache[place(table[b], n, cache.shape[1])].tobytes() for b, n in enumerate(contexts)]
    return found


@given(case=cases(), rounding=ROUNDINGS, block_size=st.sampled_from([16, 32, 128]), seed=st.integers(0, 99))
@settings(BOUNDS, max_examples=60)
def test_paging_is_invisible(case: Case, rounding: str, block_size: int, seed: int) -> None:
    moved = repaged(case, block_size, seed)
    one, other = run(case, rounding), run(moved, rounding)
    assert one.output.tobytes() == other.output.tobytes()
    assert one.lse.tobytes() == other.lse.tobytes()
    assert held(case, one) == held(moved, other)


@given(case=cases(), rounding=ROUNDINGS)
@settings(BOUNDS, max_examples=60)
def test_the_batch_is_invisible(case: Case, rounding: str) -> None:
    whole = run(case, rounding)
    for sequence in range(len(case.inputs["past_seqlens"])):
        single, rows = alone(case, sequence)
        if rows.start < rows.stop:
            outputs = run(single, rounding)
            assert outputs.output.tobytes() == whole.output[rows].tobytes()
            assert outputs.lse.tobytes() == whole.lse[rows].tobytes()


@given(case=cases(sequences=1), rounding=ROUNDINGS, data=st.data())
@settings(BOUNDS, max_examples=60)
def test_splitting_a_prefill_is_invisible(case: Case, rounding: str, data: st.DataObject) -> None:
    left, lengths = len(case.inputs["query"]), []
    while left:
        lengths.append(data.draw(st.integers(1, left)))
        left -= lengths[-1]
    whole = run(case, rounding)
    parts = [
        paged_attention(case.attributes, piece, rounding=rounding, extensions=case.extensions)
        for piece in pieces(case, lengths)
    ]
    assert b"".join(part.output.tobytes() for part in parts) == whole.output.tobytes()
    assert b"".join(part.lse.tobytes() for part in parts) == whole.lse.tobytes()
    assert parts[-1].key_cache.tobytes() == whole.key_cache.tobytes()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_mask_for_other_rows_changes_no_bit_beside_a_value_that_is_not_finite(value: float) -> None:
    """In float64: rounding the output would hide all but a few of the differences."""
    rng = np.random.default_rng(0)
    queries, keys, values = (rng.standard_normal((2, rows, 16)) for rows in (32, 128, 128))
    values[:, 60, 3] = value
    some = np.ones((32, 128), np.bool_)
    some[:16, 50:] = False
    sums = []
    for visible in (None, some):
        softmax = RunningSoftmax(queries, 16, scale=0.25, softcap=0.0)
        with np.errstate(invalid="ignore"):
            softmax.add(keys, values, visible)
        sums.append(softmax.weighted)
    np.testing.assert_array_equal(sums[1][:, 16:], sums[0][:, 16:])
    assert np.isfinite(sums[1][:, :16]).all()


@given(case=cases(), data=st.data())
@settings(BOUNDS, max_examples=40)
def test_only_the_named_slots_change(case: Case, data: st.DataObject) -> None:
    inputs = case.fresh()
    before = {name: inputs[name].copy() for name in ("key_cache", "value_cache") if name in inputs}
    num_blocks, block_size = inputs["key_cache"].shape[:2]
    places = st.integers(-3, num_blocks * block_size + 2)
    tokens = len(inputs["query"])
    slots = np.array(data.draw(st.lists(places, min_size=tokens, max_size=tokens)), np.int32)
    inputs["slot_mapping"] = slots
    paged_attention(case.attributes, inputs, extensions=case.extensions)
    named = np.zeros(num_blocks * block_size, np.bool_)
    named[slots[(slots >= 0) & (slots < num_blocks * block_size)]] = True
    for name, old in before.items():
        kept = ~named.reshape(num_blocks, block_size)
        assert inputs[name][kept].tobytes() == old[kept].tobytes()


@given(case=cases(local_window_size=-1))
@settings(BOUNDS, max_examples=25)
def test_a_window_beyond_the_context_is_none(case: Case) -> None:
    wide = case.attributes.model_copy(update={"local_window_size": 10_000})
    assert run(Case(wide, case.inputs, case.extensions)).output.tobytes() == run(case).output.tobytes()


@given(case=cases(softcap=0.0))
@settings(BOUNDS, max_examples=25)
def test_a_huge_softcap_is_none(case: Case) -> None:
    capped = case.attributes.model_copy(update={"softcap": 1e20})
    plain = run(case).output
    result = compare(run(Case(capped, case.inputs, case.extensions)).output, plain)
    assert result.differing <= 1
    assert result.max_abs <= tolerance.one_unit(plain).max()


@given(case=cases(layout="SEPARATE", kv_num_heads=2, block_size=256))
@settings(BOUNDS, max_examples=25)
def test_a_sink_at_minus_infinity_is_none(case: Case) -> None:
    heads = case.attributes.num_heads
    sunk = case.fresh() | {"head_sink": np.full(heads, -np.inf, case.inputs["query"].dtype)}
    plain, with_sink = run(case), run(Case(case.attributes, sunk, case.extensions))
    assert with_sink.output.tobytes() == plain.output.tobytes()
    assert with_sink.lse.tobytes() == plain.lse.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rounding", ["ort", "exact"])
def test_packed_is_unpacked(dtype: str, rounding: str) -> None:
    packed = make_case(
        new=[5, 1],
        past=[3, 40],
        layout="SEPARATE",
        kv_num_heads=2,
        packed=True,
        dtype=dtype,
        rotary_dim=32,
        norm=True,
    )
    inputs = packed.fresh()
    q, k, v = np.split(inputs["query"], [4 * 64, 6 * 64], axis=1)
    inputs |= {"query": q, "key": k, "value": v}
    one, other = run(packed, rounding), run(Case(packed.attributes, inputs, packed.extensions), rounding)
    assert one.output.tobytes() == other.output.tobytes()
    assert one.key_cache.tobytes() == other.key_cache.tobytes()


@pytest.mark.parametrize("rounding", ["ort", "exact"])
def test_a_prefill_whose_products_are_threaded_equals_decode(rounding: str) -> None:
    case = make_case(
        new=[150], past=[170], num_heads=16, head_size=576, v_head_size=512, rotary_dim=64, dtype="float32"
    )
    whole = run(case, rounding)
    parts = [
        paged_attention(case.attributes, piece, rounding=rounding, extensions=case.extensions)
        for piece in pieces(case, [100, 49, 1])
    ]
    assert np.concatenate([part.output for part in parts]).tobytes() == whole.output.tobytes()
    assert np.concatenate([part.lse for part in parts]).tobytes() == whole.lse.tobytes()
