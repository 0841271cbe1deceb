"""Every published number of the reference's design, from our own formulas, and what they leave out."""

import numpy as np
import pytest
from paged_kv.errors import InvalidGeometry
from paged_kv.testing.vmm import VmmStand
from paged_kv.vmm import (
    BasePlacement,
    BindingGeometry,
    CommitPlanner,
    GranuleTable,
    GraphLifecycle,
    KvCacheGeometry,
    KvGrowthController,
    KvLayout,
    MappedStorage,
    Placement,
    ReallocStorage,
    Shareability,
    capacity_bucket,
    live_prefix_ranges,
)

G = 2 << 20
MIB = 1 << 20
SMALL = {"layers": 24, "kv_heads": 2, "head_dim": 64}  # qwen2.5-0.5b
LARGE = {"layers": 48, "kv_heads": 8, "head_dim": 128}  # qwen2.5-14b


def plan_of(layout, dims, capacity, tokens, placement=BasePlacement.GRANULE_ALIGNED, **where):
    geometry = KvCacheGeometry.uniform(layout, capacity=capacity, **dims)
    placed = Placement.of(geometry, G, placement, **where)
    return CommitPlanner(placed).plan(GranuleTable(placed), tokens, tokens)


def granules(plan) -> tuple[int, int]:
    return plan.attributed_bytes // G, plan.physical_bytes // G


def test_bytes_of_a_token() -> None:
    small = KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, capacity=512, **SMALL)
    assert len(small.bindings) == 48
    assert small.bindings[0].bytes_per_token == 256
    assert small.bytes_per_token == 12_288
    assert small.bindings[0].reserved_bytes == 131_072 < G
    assert KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, capacity=512, **LARGE).bytes_per_token == 196_608


@pytest.mark.parametrize("layout", [KvLayout.HEAD_MAJOR_BUCKET, KvLayout.SEQ_MAJOR, KvLayout.HEAD_MAJOR])
def test_a_small_model_sits_on_the_floor_of_two_granules_a_layer(layout) -> None:
    plan = plan_of(layout, SMALL, 512, 64)
    assert plan.attributed_bytes == plan.physical_bytes == 100_663_296 == 48 * G


def test_f1_packing_removes_the_floor_and_the_attributed_number_does_not_show_it() -> None:
    packed = plan_of(KvLayout.SEQ_MAJOR, SMALL, 512, 512, BasePlacement.PACKED, align=64)
    assert granules(packed) == (48, 3)
    for phase in (64, 65_536, G - 64):
        shifted = plan_of(KvLayout.SEQ_MAJOR, SMALL, 512, 512, BasePlacement.PACKED, align=64, phase=phase)
        assert granules(shifted) == (51, 4)  # three bindings straddle a border
    assert 6 * MIB <= packed.physical_bytes <= shifted.physical_bytes == 8 * MIB
    aligned = plan_of(KvLayout.SEQ_MAJOR, SMALL, 512, 512)
    assert granules(aligned) == (48, 48)
    assert packed.logical_bytes == aligned.logical_bytes == 512 * 12_288


@pytest.mark.parametrize(("tokens", "published"), [(1_024, 192), (2_048, 288), (4_096, 480), (8_192, 864)])
def test_f1_the_published_sweep_counts_every_border_granule_twice(tokens: int, published: int) -> None:
    phase = 1_677_696  # about 1.6 MiB, a multiple of 64
    plan = plan_of(
        KvLayout.HEAD_MAJOR_BUCKET, LARGE, tokens, tokens, BasePlacement.PACKED, align=64, phase=phase
    )
    attributed, physical = granules(plan)
    assert attributed == published
    assert physical == published - 95  # 96 bindings have 95 neighbours, and share a granule with each
    assert physical == 96 * tokens // 1_024 + 1


def decode(layout, *, realloc=False, capture=True, min_bucket=8, dims=SMALL, hard_max=512, **storage):
    """The reference's run: a prompt of 5, then 47 decode steps."""
    stand = VmmStand()
    geometry = KvCacheGeometry.uniform(layout, capacity=hard_max, **dims)
    held = ReallocStorage(geometry, stand.pool) if realloc else MappedStorage(geometry, stand.pool, **storage)
    graph = GraphLifecycle(capture)
    controller = KvGrowthController(held, hard_max=hard_max, min_bucket=min_bucket, graph=graph)
    controller.ensure(5)
    grants = []
    for length in range(6, 53):
        growth = controller.ensure(length)
        if growth is not None:
            grants.append(growth.billed_bytes)
        with graph.step():
            pass
    if not realloc:
        stand.watch(held.arena)
    result = controller.counters, held.physical_bytes, grants
    held.close()
    if not realloc:
        stand.assert_empty()
    return result


def four(counters) -> tuple[int, int, int, int]:
    return counters.captures, counters.replays, counters.invalidations, counters.growth_keeps


HEAD, SEQ = KvLayout.HEAD_MAJOR_BUCKET, KvLayout.SEQ_MAJOR


@pytest.mark.parametrize(
    ("layout", "options", "graph", "events", "moved", "copied", "physical"),
    [
        (HEAD, {}, (4, 39, 4, 0), 3, 688_576, 344_064, 100_663_296),
        (SEQ, {}, (1, 45, 1, 3), 3, 0, 0, 100_663_296),
        (HEAD, {"min_bucket": 64}, (1, 45, 1, 0), 0, 0, 0, 100_663_296),
        (SEQ, {"min_bucket": 64}, (1, 45, 1, 0), 0, 0, 0, 100_663_296),
        (HEAD, {"capture": False}, (0, 0, 4, 0), 3, 688_576, 344_064, 100_663_296),
        (SEQ, {"capture": False}, (0, 0, 1, 3), 3, 0, 0, 100_663_296),
        (HEAD, {"capture": False, "realloc": True}, (0, 0, 4, 0), 3, 688_576, 688_128, 786_432),
        (SEQ, {"capture": False, "realloc": True}, (0, 0, 4, 0), 3, 688_576, 688_128, 786_432),
        (HEAD, {"realloc": True}, (4, 39, 4, 0), 3, 688_576, 688_128, 786_432),
        (SEQ, {"placement": BasePlacement.PACKED}, (1, 45, 1, 3), 3, 0, 0, 6 * MIB),
    ],
)
def test_the_counters_of_a_decode_of_48_tokens(
    layout, options, graph, events, moved, copied, physical
) -> None:
    counters, physical_bytes, _ = decode(layout, **options)
    assert four(counters) == graph
    assert (counters.growth_events, counters.kv_bytes_moved) == (events, moved)
    assert counters.actual_copy_bytes == copied  # F2: head 0 does not move, and there is no mask to copy
    assert physical_bytes == physical


def test_f2_the_formula_and_what_is_really_copied() -> None:
    assert (8 + 16 + 32) * (12_288 + 8) == 688_576
    assert (8 + 16 + 32) * 12_288 // 2 == 344_064
    stand = VmmStand()
    geometry = KvCacheGeometry.uniform(HEAD, capacity=1_024, **LARGE)
    controller = KvGrowthController(MappedStorage(geometry, stand.pool))
    controller.ensure(512)
    controller.ensure(513)
    counters = controller.counters
    assert counters.kv_bytes_moved == 512 * (196_608 + 8) == 100_667_392
    assert counters.actual_copy_bytes == 512 * 196_608 * 7 // 8 == 88_080_384


def test_f3_the_growths_of_the_small_model_bill_nothing() -> None:
    for layout in (HEAD, SEQ):
        counters, _, billed = decode(layout)
        assert billed == [0, 0, 0]
        assert (counters.grants, counters.growth_events) == (1, 3)


@pytest.mark.parametrize(
    ("dims", "tokens", "head", "seq"),
    [(LARGE, 1, 8, 1), (SMALL, 1, 2, 1), (LARGE, 8_192, 8, 8), (LARGE, 4_096, 8, 4)],
)
def test_granules_of_one_binding_at_a_stride_of_32768(dims, tokens: int, head: int, seq: int) -> None:
    one = {**dims, "layers": 1}
    found = [granules(plan_of(layout, one, 32_768, tokens)) for layout in (KvLayout.HEAD_MAJOR, SEQ)]
    assert found == [(2 * head, 2 * head), (2 * seq, 2 * seq)]


@pytest.mark.parametrize(
    ("dims", "per_binding", "model"), [(SMALL, (4, 2), (192, 96)), (LARGE, (16, 2), (1_536, 192))]
)
def test_residency_in_mebibytes(dims, per_binding, model) -> None:
    plans = [plan_of(layout, dims, 32_768, 1) for layout in (KvLayout.HEAD_MAJOR, SEQ)]
    assert tuple(plan.physical_bytes // MIB for plan in plans) == model
    assert tuple(plan.physical_bytes // MIB // (2 * dims["layers"]) for plan in plans) == per_binding


def test_growth_from_100_to_4000_tokens_reaches_the_fourth_granule() -> None:
    one = {**LARGE, "layers": 1}
    first, later = (plan_of(SEQ, one, 32_768, tokens).newly_mapped.tolist() for tokens in (100, 4_000))
    keys = 32_768 * 2_048 // G
    assert (max(g for g in first if g < keys), max(g for g in later if g < keys)) == (0, 3)
    assert (4_000 * 2_048 - 1) // G == 3


def test_token_major_needs_one_granule_for_ten_tokens() -> None:
    for tokens in (1, 10):
        assert granules(plan_of(KvLayout.TOKEN_MAJOR, LARGE, 4_096, tokens)) == (1, 1)
    plan = plan_of(KvLayout.TOKEN_MAJOR, LARGE, 4_096, 10)
    assert plan.logical_bytes == 1_966_080
    geometry = KvCacheGeometry.uniform(KvLayout.TOKEN_MAJOR, capacity=4_096, **LARGE)
    assert Placement.of(geometry, G).total_bytes == 768 * MIB
    stand = VmmStand()
    arena = stand.watch(MappedStorage(geometry, stand.pool).arena)
    arena.commit(arena.planner.plan(arena.table, 10))
    assert arena.mapped_bytes == G
    arena.decommit(arena.planner.shrink_plan(arena.table, 0))
    assert arena.mapped_bytes == 0


def test_a_head_major_probe_and_the_closed_form() -> None:
    assert plan_of(KvLayout.HEAD_MAJOR, {**LARGE, "layers": 1}, 32_768, 1).physical_bytes == 32 * MIB
    assert plan_of(KvLayout.HEAD_MAJOR, LARGE, 32_768, 1).physical_bytes == 1_536 * MIB == 768 * G


@pytest.mark.parametrize("tokens", [1, 1_023, 1_024, 1_025, 20_000])
def test_closed_forms_when_everything_is_aligned(tokens: int) -> None:
    heads = 48 * 2 * 8 * -(-tokens * 256 // G)
    seq = 48 * 2 * -(-tokens * 2_048 // G)
    token = -(-tokens * 48 * 2 * 2_048 // G)
    assert granules(plan_of(KvLayout.HEAD_MAJOR, LARGE, 32_768, tokens))[1] == heads
    assert granules(plan_of(SEQ, LARGE, 32_768, tokens))[1] == seq
    assert granules(plan_of(KvLayout.TOKEN_MAJOR, LARGE, 32_768, tokens))[1] == token


def test_the_clamp_and_the_windows() -> None:
    binding = BindingGeometry(SEQ, 256, kv_heads=2, head_dim=64)
    assert live_prefix_ranges(binding, 100_000).tolist() == [[0, 256 * 256]]
    two = KvCacheGeometry((BindingGeometry(SEQ, 10, 1, 1, 1), BindingGeometry(SEQ, 10, 1, 1, 1)))
    placed = Placement.of(two, G, BasePlacement.PACKED, align=1)
    plan = CommitPlanner(placed).plan(GranuleTable(placed), 10)
    assert granules(plan) == (2, 1)
    wide = KvCacheGeometry((BindingGeometry(SEQ, 1, 1, G + 10, 1), BindingGeometry(SEQ, 1, 1, 20, 1)))
    placed = Placement(wide, G, np.array([0, G]), np.array([G + 10, 20]))
    planner = CommitPlanner(placed)
    assert granules(planner.plan(GranuleTable(placed), 1)) == (3, 2)


@pytest.mark.parametrize(
    ("length", "hard_max", "bucket"),
    [
        *((length, 1 << 30, 256) for length in (0, 1, 128, 256)),
        (257, 1 << 30, 512),
        (5_000, 1 << 30, 8_192),
        (20_000, 32_768, 32_768),
        (100, 128, 128),
        (0, 0, 0),
    ],
)
def test_capacity_buckets(length: int, hard_max: int, bucket: int) -> None:
    assert capacity_bucket(length, hard_max) == bucket


def test_the_peak_of_a_reallocation_is_old_and_new() -> None:
    stand = VmmStand()
    binding = BindingGeometry(KvLayout.SEQ_MAJOR_BUCKET, 512, kv_heads=1, head_dim=16)
    held = ReallocStorage(KvCacheGeometry((binding,)), stand.pool)
    assert binding.bytes_per_token == 32
    controller = KvGrowthController(held)
    controller.ensure(256)
    free, _ = stand.driver.memory_info()
    least: list[int] = []
    allocate = stand.driver.allocate

    def watched(nbytes: int) -> int:
        address = allocate(nbytes)
        least.append(stand.driver.memory_info()[0])
        return address

    stand.driver.allocate = watched
    controller.ensure(257)
    assert free + 256 * 32 - min(least) == 24_576
    held.close()


FRAGMENTS = {
    "14b head": (768, 256),
    "14b seq": (96, 2_048),
    "14b token": (1, 196_608),
    "0.5b seq": (48, 256),
    "0.5b head": (96, 128),
    "0.5b token": (1, 12_288),
}


@pytest.mark.parametrize(
    ("which", "tokens"),
    [("14b head", 8_192), ("0.5b head", 16_384), ("14b seq", 1_024), ("0.5b seq", 8_192), ("14b token", 11)],
)
def test_tokens_for_the_first_shared_granule(which: str, tokens: int) -> None:
    share = Shareability(*FRAGMENTS[which], G)
    assert share.tokens_for_first_granule == tokens
    assert share.is_shareable(tokens)
    assert not share.is_shareable(tokens - 1)


@pytest.mark.parametrize(
    ("which", "tokens", "operations"),
    [
        ("14b head", 8_192, 768),
        ("14b seq", 2_000, 96),
        ("14b seq", 2_048, 192),
        ("14b seq", 8_192, 768),
        ("14b token", 2_000, 187),
        ("0.5b seq", 8_192, 48),
        ("0.5b token", 512, 3),
    ],
)
def test_map_operations_of_a_shared_prefix(which: str, tokens: int, operations: int) -> None:
    share = Shareability(*FRAGMENTS[which], G)
    assert share.map_operations(tokens) == operations


def test_fragments_come_from_the_geometry() -> None:
    for layout, name in ((KvLayout.HEAD_MAJOR, "head"), (SEQ, "seq"), (KvLayout.TOKEN_MAJOR, "token")):
        for dims, model in ((LARGE, "14b"), (SMALL, "0.5b")):
            geometry = KvCacheGeometry.uniform(layout, capacity=16_384, **dims)
            share = Shareability.of(geometry, G)
            assert (share.fragments, share.contiguous_bytes_per_token) == FRAGMENTS[f"{model} {name}"]


def test_what_sharing_saves_and_leaves() -> None:
    seq = Shareability(*FRAGMENTS["14b seq"], G)
    assert seq.fragment_bytes(2_000) == 4_096_000
    assert seq.duplicated_bytes(2_000) == 4_096_000 - G
    assert seq.saved_bytes(2_048, 8) == 2_688 * MIB
    token = Shareability(*FRAGMENTS["14b token"], G)
    assert (token.shared_granules(2_000), -(-token.fragment_bytes(2_000) // G)) == (187, 188)
    assert 3 * MIB == 196_608 * 16  # what one page of 16 tokens shares instead


def test_the_shared_prefix_of_two_rows() -> None:
    two = Shareability(fragments=2, contiguous_bytes_per_token=2_048, granularity=G)
    assert two.physical_bytes(2_048, 2) == 8 * G == 16_777_216
    assert two.physical_bytes(2_048, 2, shared_tokens=1_024) == 6 * G == 12_582_912
    assert two.physical_bytes(3_072, 2) == 12 * G == 25_165_824
    assert two.physical_bytes(3_072, 2, shared_tokens=1_024) == 10 * G == 20_971_520
    private = two.physical_bytes(2_048, 1) - two.physical_bytes(1_024, 1)
    assert private == 4_194_304


def test_sharing_is_not_judged_for_bindings_that_differ_or_rows_that_are_none() -> None:
    kinds = tuple(
        BindingGeometry(layout, 64, kv_heads=2, head_dim=4) for layout in (SEQ, KvLayout.HEAD_MAJOR)
    )
    with pytest.raises(InvalidGeometry):
        Shareability.of(KvCacheGeometry(kinds), G)
    one = Shareability.of(KvCacheGeometry(kinds[:1]), G)
    for bad in (-1, 1.5):
        for call in (one.physical_bytes, one.saved_bytes):
            with pytest.raises(InvalidGeometry):
                call(10, bad)


def test_a_granule_of_nothing_shares_nothing() -> None:
    none = Shareability(fragments=2, contiguous_bytes_per_token=2_048, granularity=0)
    assert none.tokens_for_first_granule is None
    assert not none.is_shareable(1 << 40)
    assert none.map_operations(1 << 40) == none.saved_bytes(1 << 20, 9) == 0
    assert none.physical_bytes(10, 3) == 3 * 2 * 10 * 2_048


def test_the_growth_win_that_a_small_model_cannot_show() -> None:
    """14b, a stride of 32k, 100 to 4,000 to 16,000 tokens: one graph, no byte moved, kv_heads times less."""
    found = {}
    for layout in (SEQ, KvLayout.HEAD_MAJOR):
        stand = VmmStand()
        held = MappedStorage(KvCacheGeometry.uniform(layout, capacity=32_768, **LARGE), stand.pool)
        graph = GraphLifecycle()
        controller = KvGrowthController(held, graph=graph)
        for tokens in (100, 4_000, 16_000):
            controller.ensure(tokens)
            for _ in range(3):
                with graph.step():
                    pass
            found.setdefault(layout, []).append(held.physical_bytes // G)
        found[layout, "graph"] = four(controller.counters)
        assert controller.counters.kv_bytes_moved == controller.counters.actual_copy_bytes == 0
        stand.watch(held.arena)
        stand.assert_consistent()
    assert found[SEQ] == [96, 384, 1_536]
    assert found[KvLayout.HEAD_MAJOR] == [768, 768, 1_536]
    assert found[SEQ][0] * 8 == found[KvLayout.HEAD_MAJOR][0]
    assert found[SEQ, "graph"] == (1, 7, 1, 2)
    assert found[KvLayout.HEAD_MAJOR, "graph"] == (3, 3, 3, 0)
