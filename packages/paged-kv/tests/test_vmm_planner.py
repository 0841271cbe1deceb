"""Ranges and plans agree with a byte-by-byte account, for any layout, placement and state."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kv.errors import CommitOutOfRange, ForeignPlan, GranularityMismatch, InvalidGeometry, LayoutRefused
from paged_kv.vmm import (
    BasePlacement,
    BindingGeometry,
    CommitPlanner,
    GranuleTable,
    KvCacheGeometry,
    KvLayout,
    Placement,
    live_prefix_ranges,
)
from paged_kv.vmm.buckets import capacity_bucket, stride_bucket
from paged_kv.vmm.placement import require_granularity

FIXED = (KvLayout.SEQ_MAJOR, KvLayout.HEAD_MAJOR)
quick = settings(max_examples=120, deadline=None)


@st.composite
def bindings(draw) -> BindingGeometry:
    layout = draw(st.sampled_from(list(KvLayout)))
    many = layout not in (KvLayout.SEQ_MAJOR_BUCKET, KvLayout.TOKEN_MAJOR)
    return BindingGeometry(
        layout,
        capacity=draw(st.integers(1, 40)),
        kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 5)),
        element_size=draw(st.sampled_from([1, 2])),
        batch=draw(st.integers(1, 3)) if many else 1,
        planes=draw(st.integers(1, 4)) if layout is KvLayout.TOKEN_MAJOR else 1,
    )


def bytes_of(binding: BindingGeometry, valid: int, bucket: int) -> set[int]:
    """The bytes of every live element, from the strides of the layout's tensor."""
    live = min(valid, binding.capacity)
    stride = bucket if binding.layout.grows else binding.capacity
    found = set()
    for row in range(binding.batch):
        for head in range(binding.kv_heads * binding.planes):
            for token in range(live):
                heads = binding.kv_heads * binding.planes
                if binding.layout.is_head_major:
                    element = ((row * heads + head) * stride + token) * binding.head_dim
                else:
                    element = ((row * stride + token) * heads + head) * binding.head_dim
                first = element * binding.element_size
                found.update(range(first, first + binding.head_dim * binding.element_size))
    return found


@quick
@given(bindings(), st.integers(0, 50), st.data())
def test_the_ranges_are_the_live_elements(binding: BindingGeometry, valid: int, data) -> None:
    live = min(valid, binding.capacity)
    bucket = data.draw(st.integers(max(1, live), binding.capacity))
    ranges = live_prefix_ranges(binding, valid, bucket if binding.layout.grows else None)
    covered = {byte for start, end in ranges.tolist() for byte in range(start, end)}
    assert sum(end - start for start, end in ranges.tolist()) == len(covered)
    expected = bytes_of(binding, valid, bucket)
    if binding.layout.grows:
        assert expected <= covered  # dense to the bucket
        whole = set(range(binding.batch * bucket * binding.bytes_per_token))
        assert covered == (whole if live else set())
        if live == bucket:
            assert covered == expected
    else:
        assert covered == expected
    assert covered <= set(range(binding.reserved_bytes))
    assert ranges.dtype == np.int64
    assert (np.diff(ranges.ravel()) >= 0).all()


@st.composite
def scenes(draw):
    """Bindings of one or two geometries, placed, and a few lengths."""
    kinds = draw(st.lists(bindings(), min_size=1, max_size=2))
    order = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    granule = draw(st.sampled_from([16, 64, 256]))
    packed = draw(st.booleans())
    align = draw(st.sampled_from([1, 4, 16]))
    where = {"align": align, "phase": align * draw(st.integers(0, 5))} if packed else {}
    how = BasePlacement.PACKED if packed else BasePlacement.GRANULE_ALIGNED
    geometry = KvCacheGeometry(tuple(order))
    placed = Placement.of(geometry, granule, how, **where)
    lengths = draw(st.lists(st.integers(0, geometry.capacity), min_size=1, max_size=4))
    return placed, lengths


def touched(placed: Placement, tokens: int) -> list[set[int]]:
    """Granules that each binding touches, byte by byte."""
    found = []
    for binding, base in zip(placed.geometry.bindings, placed.bases.tolist(), strict=True):
        ranges = live_prefix_ranges(binding, tokens, tokens).tolist()
        found.append(
            {(base + byte) // placed.granularity for start, end in ranges for byte in range(start, end)}
        )
    return found


@quick
@given(scenes())
def test_a_plan_is_the_byte_by_byte_account(scene) -> None:
    placed, lengths = scene
    planner, table = CommitPlanner(placed), GranuleTable(placed)
    claims: list[set[int]] = [set() for _ in placed.geometry.bindings]
    for tokens in lengths:
        plan = planner.plan(table, tokens, tokens)
        each = touched(placed, tokens)
        before, now = set().union(*claims), set().union(*each)
        assert plan.attributed_bytes == sum(map(len, each)) * placed.granularity
        assert plan.physical_bytes == len(now) * placed.granularity
        assert plan.newly_mapped.tolist() == sorted(now - before)
        assert plan.billed_bytes == len(now - before) * placed.granularity
        assert plan.physical_bytes <= plan.attributed_bytes
        assert plan.is_committed == all(new <= old for new, old in zip(each, claims, strict=True))
        runs = zip(plan.run_first.tolist(), plan.run_count.tolist(), strict=True)
        flat = [granule for first, count in runs for granule in range(first, first + count)]
        assert flat == plan.newly_mapped.tolist()
        assert (np.diff(plan.run_first) > 1).all()
        table.apply_commit(plan.cells, plan.newly_mapped.tolist(), plan.newly_mapped.tolist())
        claims = [old | new for old, new in zip(claims, each, strict=True)]
        assert planner.plan(table, tokens, tokens).is_committed


@quick
@given(scenes())
def test_a_shrink_plan_leaves_what_a_fresh_plan_would_have(scene) -> None:
    placed, lengths = scene
    planner, table = CommitPlanner(placed), GranuleTable(placed)
    high = max(lengths)
    if placed.geometry.bindings[0].layout is KvLayout.HEAD_MAJOR_BUCKET:
        high = lengths[0]
    plan = planner.plan(table, high, high)
    table.apply_commit(plan.cells, plan.newly_mapped.tolist(), plan.newly_mapped.tolist())
    low = min(lengths)
    shrink = planner.shrink_plan(table, low, low)
    was = set(table.handles)
    table.apply_unclaim(shrink.cells)
    for granule in shrink.unmapped.tolist():
        table.apply_unmapped(granule)
    assert shrink.refunded_bytes == len(shrink.unmapped) * placed.granularity
    kept = set().union(*touched(placed, low))
    assert set(table.handles) == kept & was
    assert set(np.flatnonzero(table.refs).tolist()) == set(table.handles)


def test_aligned_bindings_share_no_granule() -> None:
    geometry = KvCacheGeometry((BindingGeometry(KvLayout.SEQ_MAJOR, 10, 1, 3, 1),) * 5)
    placed = Placement.of(geometry, 16)
    assert placed.bases.tolist() == [0, 32, 64, 96, 128]
    assert np.bincount(placed.cell_granule).max() == 1
    for array in (placed.bases, placed.sizes, placed.first, placed.cells, placed.cell_granule):
        assert not array.flags.writeable


def test_nothing_overflows_where_int32_would() -> None:
    big = KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, layers=128, kv_heads=64, head_dim=256, capacity=1 << 20)
    assert big.bindings[0].reserved_bytes == 1 << 35
    placed = Placement.of(big, 2 << 20)
    plan = CommitPlanner(placed).plan(GranuleTable(placed), 1 << 20)
    assert plan.billed_bytes == plan.logical_bytes == 256 << 35
    assert int(placed.bases[-1]) == 255 << 35


SEQ = BindingGeometry(KvLayout.SEQ_MAJOR, 32, kv_heads=2, head_dim=4)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"capacity": 0}, InvalidGeometry),
        ({"kv_heads": -1}, InvalidGeometry),
        ({"head_dim": 1.5}, InvalidGeometry),
        ({"element_size": True}, InvalidGeometry),
        ({"batch": None}, InvalidGeometry),
        ({"layout": "seq_major"}, InvalidGeometry),
        ({"planes": 2}, InvalidGeometry),
        ({"capacity": 1 << 54}, InvalidGeometry),
        ({"batch": (1 << 24) + 1}, InvalidGeometry),
        ({"batch": 1 << 23, "kv_heads": 4, "layout": KvLayout.HEAD_MAJOR}, InvalidGeometry),
        ({"layout": KvLayout.SEQ_MAJOR_BUCKET, "batch": 2}, LayoutRefused),
        ({"layout": KvLayout.TOKEN_MAJOR, "batch": 2}, LayoutRefused),
    ],
)
def test_bad_bindings(arguments, error) -> None:
    good = {"layout": KvLayout.SEQ_MAJOR, "capacity": 32, "kv_heads": 2, "head_dim": 4}
    with pytest.raises(error) as caught:
        BindingGeometry(**{**good, **arguments})
    assert caught.value.numbers


@pytest.mark.parametrize("valid", [-1, 1.0, None, True, "3"])
def test_bad_lengths(valid) -> None:
    with pytest.raises(InvalidGeometry):
        live_prefix_ranges(SEQ, valid)


def test_buckets_beyond_the_reservation_or_below_what_lives() -> None:
    growing = BindingGeometry(KvLayout.HEAD_MAJOR_BUCKET, 32, kv_heads=2, head_dim=4)
    for bucket in (33, 4):
        with pytest.raises(CommitOutOfRange) as caught:
            live_prefix_ranges(growing, 5, bucket)
        assert caught.value.numbers == {"needed": bucket, "live": 5, "maximum": 32}
    assert live_prefix_ranges(growing, 5).tolist() == [[0, 32 * 16]]


def test_plans_beyond_the_reservation_or_for_another_arena() -> None:
    placed, other = (Placement.of(KvCacheGeometry((SEQ,)), 64) for _ in range(2))
    planner, table = CommitPlanner(placed), GranuleTable(placed)
    for plan in (planner.plan, planner.shrink_plan):
        with pytest.raises(CommitOutOfRange) as caught:
            plan(table, 33)
        assert caught.value.numbers == {"needed": 33, "maximum": 32}
        with pytest.raises(InvalidGeometry):
            plan(table, -1)
        with pytest.raises(ForeignPlan):
            plan(GranuleTable(other), 1)


@pytest.mark.parametrize("granule", [0, -2, 3, 2.0, True, "2", 1 << 60])
def test_granules_that_are_no_power_of_two(granule) -> None:
    with pytest.raises(GranularityMismatch):
        require_granularity(granule)
    with pytest.raises(GranularityMismatch):
        Placement.of(KvCacheGeometry((SEQ,)), granule)
    with pytest.raises(GranularityMismatch):
        Placement.of(KvCacheGeometry((SEQ,)), 64, BasePlacement.PACKED, align=granule)


def test_bad_placements() -> None:
    geometry = KvCacheGeometry((SEQ,))
    for where in ({"align": 128}, {"align": 16, "phase": 8}, {"phase": -1}):
        with pytest.raises(InvalidGeometry):
            Placement.of(geometry, 64, BasePlacement.PACKED, **where)
    for how in ("packed", "dense", None):
        with pytest.raises(InvalidGeometry):
            Placement.of(geometry, 64, how)
    huge = BindingGeometry(KvLayout.SEQ_MAJOR, 1 << 52, kv_heads=1, head_dim=8)
    with pytest.raises(InvalidGeometry):
        Placement.of(KvCacheGeometry((huge, huge)), 64)
    many = BindingGeometry(KvLayout.SEQ_MAJOR, 64 << 24, kv_heads=1, head_dim=1, element_size=1)
    with pytest.raises(InvalidGeometry) as caught:
        Placement.of(KvCacheGeometry((many, SEQ)), 64)
    assert caught.value.numbers["granules"] == (1 << 24) + 8
    with pytest.raises(InvalidGeometry):
        KvCacheGeometry(())
    for layers in (0, (1 << 20) + 1, 1 << 62):
        with pytest.raises(InvalidGeometry):
            KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, layers=layers, kv_heads=1, head_dim=1, capacity=1)


@pytest.mark.parametrize("bucket", [capacity_bucket, lambda length, most: stride_bucket(length, most, 8)])
def test_buckets_refuse_what_does_not_fit(bucket) -> None:
    with pytest.raises(CommitOutOfRange) as caught:
        bucket(129, 128)
    assert caught.value.numbers == {"needed": 129, "maximum": 128}
    for bad in ((-1, 8), (1.5, 8), (1, -1)):
        with pytest.raises(InvalidGeometry):
            bucket(*bad)
    with pytest.raises(InvalidGeometry):
        stride_bucket(1, 8, 0)


@quick
@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_a_bucket_holds_the_length_and_is_no_larger_than_it_must_be(length, most, least) -> None:
    if length > most:
        return
    bucket = capacity_bucket(length, most, least)
    assert length <= bucket <= most
    assert bucket in (most, least) or (bucket & (bucket - 1) == 0 and bucket < 2 * max(length, 1))
    stride = stride_bucket(length, most, max(1, least))
    assert length <= stride <= most
    assert stride == most or stride - length < max(1, least)
