"""The Hopper path's host side: when it serves, and what it tells the copy engine."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
from paged_cuda import ArgumentMismatch, Bounds, CubinCache, Device, DeviceArray, DriverError, PagedAttention
from paged_cuda._nvrtc import compile_to_cubin
from paged_cuda.launch_plan import PathOptions
from paged_cuda.paths import choose_path
from paged_cuda.sm90_path import HopperPath, rotated_slabs
from paged_cuda.sm90_shape import score_warpgroups, shape_for
from paged_cuda.small_steps import small_pairs
from paged_cuda.sources import kernel_source
from paged_cuda.split_plan import MAX_SLICES, Apart, Costs
from paged_cuda.tensor_maps import TensorMaps, aligned_maps
from paged_cuda.testing import FAKE_GPU, FakeDriver
from paged_schema import Call, PagedAttentionAttributes, PagedAttentionInputs, check

HOPPER = replace(FAKE_GPU, capability=(9, 0), multiprocessors=132)
BOUNDS = Bounds(max_batch=4, max_tokens=16, max_context=4096)


def call_of(
    heads: int = 64,
    head_size: int = 576,
    v_head_size: int = 512,
    *,
    rotary: tuple[int, int] | None = None,
    block_size: int = 64,
) -> Call:
    given: dict[str, Any] = {"do_rotary": 1, "rotary_offset": rotary[0]} if rotary else {}
    attributes = PagedAttentionAttributes(
        num_heads=heads,
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=v_head_size,
        scale=0.1,
        **given,
    )
    table = f"bf16[p, {rotary[1] // 2}]" if rotary else None
    inputs = PagedAttentionInputs(
        query=f"bf16[t, {heads * head_size}]",
        key=f"bf16[t, {head_size}]",
        key_cache=f"bf16[n, {block_size}, 1, {head_size}]",
        cumulative_sequence_length="i32[b1]",
        past_seqlens="i32[b]",
        block_table="i32[b, m]",
        cos_cache=table,
        sin_cache=table,
    )
    return check(attributes, inputs, ort="1.31")


@pytest.fixture
def hopper() -> FakeDriver:
    return FakeDriver(HOPPER)


def operands_of(
    call: Call, device: Device, *, tokens: int = 3, blocks: int = 8, block_size: int = 64, room: int = 0
) -> dict[str, Any]:
    head_size, v_head_size = call.head_size or 0, call.v_head_size or 0

    def empty(*shape: int, dtype: str = "bfloat16") -> DeviceArray:
        return DeviceArray.empty(shape, dtype, device)

    query = empty(tokens, call.num_heads * head_size + room)
    if room:
        shape = (tokens, call.num_heads * head_size)
        query = DeviceArray(query.pointer, shape, query.strides, query.dtype, query.ordinal, query)
    given: dict[str, Any] = {
        "query": query,
        "key": empty(tokens, head_size),
        "key_cache": empty(blocks, block_size, 1, head_size),
        "cumulative_sequence_length": empty(3, dtype="int32"),
        "past_seqlens": empty(2, dtype="int32"),
        "block_table": empty(2, 4, dtype="int32"),
        "output": empty(tokens, call.num_heads * v_head_size),
    }
    if call.rotary:
        given |= {name: empty(4096, (call.rotary_dim or 0) // 2) for name in ("cos_cache", "sin_cache")}
    return given


def operator(driver: FakeDriver, call: Call, cubins: CubinCache, **options: Any) -> PagedAttention:
    return PagedAttention(
        call, BOUNDS, device=Device(driver, 0), cache=cubins, kernel="sm90", **options
    ).prepare()


def maps_of(op: PagedAttention, driver: FakeDriver) -> list[Any]:
    assert op._maps is not None
    at = ctypes.addressof(op._maps.maps)
    return [driver.tensor_maps.get(at + 128 * k) for k in range(3)]


def numbers_of(op: PagedAttention) -> TensorMaps:
    assert op._maps is not None
    return op._maps.maps


@pytest.mark.parametrize("tokens", [131_072, 65_536, 32_768, 16_384])
def test_bounds_are_refused_only_where_a_sum_of_costs_could_overflow(tokens: int) -> None:
    """Of a long item no tile is slow, and under a fixed split a tile counts as one."""
    call, context = call_of(128), 2**34 // tokens
    assert choose_path(call, Bounds(64, tokens, context), HOPPER).path == "sm90"
    with pytest.raises(ArgumentMismatch, match=r"cost of a step's KV tiles"):
        choose_path(call, Bounds(64, tokens, 2 * context), HOPPER, kernel="sm90")
    options = PathOptions(split_rows=context)
    assert choose_path(call, Bounds(64, tokens, 2 * context), HOPPER, options=options).path == "sm90"


def test_the_host_struct_is_the_kernels_struct() -> None:
    checks = [f'static_assert(sizeof(TensorMaps) == {ctypes.sizeof(TensorMaps)}, "size");']
    for name, _ in TensorMaps._fields_[:-1]:
        field = f"__INTADDR__(&((TensorMaps*)0)->{name})"
        checks.append(f'static_assert({field} == {getattr(TensorMaps, name).offset}, "{name}");')
    kernel = 'extern "C" __global__ void k(const TensorMaps p) {}'
    source = "\n".join([kernel_source("layout/tensor_maps.cuh"), *checks, kernel])
    assert compile_to_cubin(source, "maps.cu", ["--gpu-architecture=sm_90a", "--std=c++17"]).cubin
    assert ctypes.addressof(aligned_maps()) % 64 == 0


@pytest.mark.parametrize(
    ("properties", "options", "call", "word"),
    [
        (FAKE_GPU, PathOptions(), call_of(), "9.0"),
        (HOPPER, PathOptions(debug=True), call_of(), "debug"),
        (HOPPER, PathOptions(row_tile=32), call_of(), "64 rows"),
        (HOPPER, PathOptions(), call_of(4, 640, 512), "576"),
        (HOPPER, PathOptions(), call_of(4, 576, 520), "512"),
        (replace(HOPPER, shared_bytes=101_376), PathOptions(), call_of(), "101376"),
    ],
)
def test_what_it_cannot_serve_it_refuses_with_the_reason(
    properties: Any, options: PathOptions, call: Call, word: str
) -> None:
    if properties is FAKE_GPU and FAKE_GPU.capability == (9, 0):
        properties = replace(FAKE_GPU, capability=(8, 0))
    refusal = HopperPath().refuses(call, properties, options)
    assert refusal is not None
    assert word in refusal
    with pytest.raises(ArgumentMismatch, match=word):
        choose_path(call, BOUNDS, properties, kernel="sm90", options=options)
    if options.row_tile is None:
        assert choose_path(call, BOUNDS, properties, options=options).path != "sm90"


@pytest.mark.parametrize(
    ("columns", "tokens", "pairs"),
    [
        (128, 1, {32: 16_384, 64: 6_144}),
        (256, 1, {32: 8_192, 64: 4_096, 128: 1_024}),
        (384, 1, {32: 8_192, 64: 4_096}),
        (512, 16, {32: 16_384, 64: 4_096, 128: 1_024}),
    ],
)
def test_small_steps_end_at_their_limits(columns: int, tokens: int, pairs: dict[int, int]) -> None:
    def small(heads: int, tokens: int, context: int) -> bool:
        call = call_of(heads, columns + 64, columns)
        return small_pairs(call, Bounds(tokens, tokens, context), PathOptions()) is not None

    last = 0
    for heads, most in pairs.items():
        for count in (last + 1, heads):
            assert small(count, 1, most)
            assert not small(count, 1, most + 1)
        last = heads
    assert not small(last + 1, 1, 1)
    assert small(32, tokens, 1)
    assert not small(32, tokens + 1, 1)


@pytest.mark.parametrize(
    ("heads", "sizes", "bounds", "path"),
    [
        (16, (576, 512), (4, 4, 65_536), "sm80"),
        (16, (576, 512), (4, 8, 65_536), "sm90"),
        (17, (576, 512), (4, 4, 65_536), "sm90"),
        (12, (576, 512), (16, 17, 65_536), "sm80"),
        (64, (576, 512), (4, 4, 65_536), "sm90"),
        (16, (192, 128), (4, 4, 65_536), "sm80"),
        (64, (192, 128), (4, 4, 65_536), "sm90"),
        (32, (576, 512), (1, 1, 16_384), "sm80"),
        (33, (576, 512), (1, 1, 4097), "sm90"),
        (64, (576, 512), (1, 1, 4096), "sm80"),
        (64, (576, 512), (1, 1, 4097), "sm90"),
        (96, (576, 512), (4, 4, 256), "sm80"),
        (96, (576, 512), (1, 1, 1025), "sm90"),
        (128, (576, 512), (1, 1, 1025), "sm90"),
        (129, (576, 512), (1, 1, 1), "sm90"),
        (128, (448, 384), (1, 1, 64), "sm90"),
        (128, (320, 256), (1, 1, 1024), "sm80"),
        (64, (576, 512), (16, 16, 256), "sm80"),
        (32, (576, 512), (17, 17, 1), "sm90"),
        (32, (576, 512), (8, 17, 1), "sm90"),
        (24, (568, 500), (1, 1, 16_384), "sm80"),
        (64, (192, 128), (1, 1, 6144), "sm80"),
        (17, (192, 128), (1, 1, 16_385), "sm90"),
        (64, (192, 128), (2, 2, 1), "sm90"),
        (64, (448, 384), (1, 1, 4096), "sm80"),
        (64, (448, 384), (1, 1, 4097), "sm90"),
        (64, (448, 384), (2, 2, 1), "sm90"),
        (16, (576, 512), (1, 16, 1024), "sm80"),
        (16, (576, 512), (1, 17, 1), "sm90"),
    ],
)
def test_auto_takes_what_the_records_show_to_be_faster(
    heads: int, sizes: tuple[int, int], bounds: tuple[int, int, int], path: str
) -> None:
    step = choose_path(call_of(heads, *sizes), Bounds(*bounds), HOPPER)
    assert step.path == path
    if path == "sm80":
        assert "measured" in step.reason
        assert "row tile 16" in step.attend.description


@pytest.mark.parametrize("options", [PathOptions(split_rows=256), PathOptions(row_tile=64)])
def test_what_the_caller_fixes_is_not_overruled_by_little_work(options: PathOptions) -> None:
    for bounds in (Bounds(1, 1, 1024), Bounds(8, 8, 65_536)):
        assert choose_path(call_of(64), bounds, HOPPER, options=options).path == "sm90"
        step = choose_path(call_of(64), bounds, HOPPER, kernel="sm80", options=options)
        assert "row tile 16" not in step.attend.description


def test_a_path_asked_for_by_name_is_taken_for_little_work_too() -> None:
    assert choose_path(call_of(64), Bounds(1, 1, 1024), HOPPER, kernel="sm90").path == "sm90"


def test_the_reason_names_the_work_and_its_limit() -> None:
    reason = choose_path(call_of(96), Bounds(2, 3, 341), HOPPER).reason
    assert "96 heads, 1023 pairs" in reason
    assert reason.endswith("above 1024")


def test_small_steps_have_low_tiles_only_where_kernels_overlap() -> None:
    for capability, tile in (((8, 0), 32), ((8, 6), 32), ((8, 9), 32), ((9, 0), 16), ((12, 0), 16)):
        properties = replace(HOPPER, capability=capability)
        step = choose_path(call_of(64), Bounds(1, 1, 1024), properties, kernel="sm80")
        assert f"row tile {tile}" in step.attend.description


def test_shapes_fit_their_gpu() -> None:
    for head_size in range(8, 584, 8):
        for v_head_size in {1, head_size // 2 or 1, min(head_size, 512)}:
            shape = shape_for(head_size, v_head_size, 232_448)
            assert shape is not None
            assert shape.shared_bytes(head_size, v_head_size) <= 232_448
            score, output, loading = shape.registers
            scores = score_warpgroups(head_size, v_head_size)
            assert scores * score + (3 - scores) * output + loading <= 512
            assert all(count % 8 == 0 and 24 <= count <= 256 for count in shape.registers)


@pytest.mark.parametrize(
    ("sizes", "scores", "stages", "registers"),
    [
        ((64, 64), 2, 8, (160, 168, 24)),
        ((192, 128), 2, 8, (160, 168, 24)),
        ((256, 128), 2, 6, (160, 168, 24)),
        ((264, 128), 1, 4, (232, 88, 104)),
        ((192, 136), 1, 6, (232, 112, 56)),
        ((576, 128), 1, 5, (232, 88, 104)),
        ((576, 512), 1, 5, (168, 160, 24)),
    ],
)
def test_narrow_rows_have_two_warpgroups_of_scores(
    sizes: tuple[int, int], scores: int, stages: int, registers: tuple[int, int, int]
) -> None:
    shape = shape_for(*sizes, 232_448)
    assert shape is not None
    assert (score_warpgroups(*sizes), shape.stages, shape.registers) == (scores, stages, registers)


@pytest.mark.parametrize("shared_bytes", range(100_000, 240_000, 8_000))
def test_a_ring_of_two_streams_is_even(shared_bytes: int) -> None:
    for head_size in range(8, 264, 8):
        shape = shape_for(head_size, min(head_size, 128), shared_bytes)
        assert shape is None or shape.stages % 2 == 0


def test_whole_rows_travel_in_one_box(hopper: FakeDriver, cubins: CubinCache) -> None:
    call = call_of(rotary=(512, 64))
    op = operator(hopper, call, cubins)
    operands = operands_of(call, op.device)
    op.run(**operands, stream=7)
    (cache, query, rotary), maps = maps_of(op, hopper), numbers_of(op)
    assert cache.address == operands["key_cache"].pointer
    assert (cache.extents, cache.strides) == ((64, 64, 9, 8), (1152, 128, 64 * 1152))
    assert (cache.box, query.box, rotary.box) == ((64, 32, 9, 1), (64, 32, 8, 1), (64, 32, 1, 1))
    assert (query.extents, query.strides[0]) == ((64, 3 * 64, 8, 1), 1152)
    assert (rotary.extents, rotary.strides[0]) == ((64, 3 * 64, 1, 1), 128)
    assert (maps.cache_slabs, maps.single_slabs, maps.rotary_slab) == (9, 0, 8)


def test_rows_with_room_between_them_travel_in_slabs(hopper: FakeDriver, cubins: CubinCache) -> None:
    call = call_of(12, 576, 512, rotary=(480, 48))
    op = operator(hopper, call, cubins)
    op.run(**operands_of(call, op.device, room=8), stream=7)
    (_, query, rotary), maps = maps_of(op, hopper), numbers_of(op)
    assert (query.extents, query.box) == ((576, 12, 1, 3), (64, 4, 1, 1))
    assert query.strides == (1152, 128, 2 * (12 * 576 + 8))
    assert (rotary.extents, maps.rotary_slab, maps.rotary_slabs) == ((128, 12, 1, 3), 7, 2)
    assert (maps.query_box, maps.query_rows, maps.single_slabs) == (4, 12, 1)


def test_short_pages_and_odd_channels_travel_in_slabs(hopper: FakeDriver, cubins: CubinCache) -> None:
    call = call_of(block_size=16)
    op = operator(hopper, call, cubins)
    op.run(**operands_of(call, op.device, block_size=16), stream=7)
    cache, query, rotary = maps_of(op, hopper)
    assert (cache.extents, cache.box, rotary) == ((576, 16, 1, 8), (64, 16, 1, 1), None)
    assert query.box == (64, 32, 9, 1)
    narrow = call_of(24, 160, 128)
    op = operator(hopper, narrow, cubins)
    op.run(**operands_of(narrow, op.device), stream=7)
    cache, query, _ = maps_of(op, hopper)
    assert (cache.extents, query.extents) == ((160, 64, 1, 8), (160, 72, 1, 1))


def test_rows_narrower_than_their_values_columns_are_padded_with_nothing(
    hopper: FakeDriver, cubins: CubinCache
) -> None:
    """Values of 64 columns are computed as 128: the second slab lies outside the tensor, so it is zeros."""
    call = call_of(24, 64, 64)
    op = operator(hopper, call, cubins)
    op.run(**operands_of(call, op.device), stream=7)
    cache, query, _ = maps_of(op, hopper)
    assert (cache.extents[2], cache.box[2], query.box[2]) == (1, 2, 1)


def test_an_empty_cache_has_a_map_that_is_never_read(hopper: FakeDriver, cubins: CubinCache) -> None:
    call = call_of()
    op = operator(hopper, call, cubins)
    operands = operands_of(call, op.device, blocks=0)
    op.run(**operands, stream=7)
    cache, _, _ = maps_of(op, hopper)
    assert (cache.address, cache.extents[3]) == (operands["query"].pointer, 1)


def test_the_stride_of_a_single_token_says_nothing(hopper: FakeDriver, cubins: CubinCache) -> None:
    """A slice of one row keeps the wide tensor's stride, which need be no multiple of anything."""
    call = call_of(16, 576, 512, rotary=(512, 64))
    op = operator(hopper, call, cubins)
    operands = operands_of(call, op.device, tokens=1)
    query = operands["query"]
    odd = DeviceArray(query.pointer, query.shape, (9217, 1), query.dtype, query.ordinal, query)
    op.run(**{**operands, "query": odd}, stream=7)
    _, query_map, rotary = maps_of(op, hopper)
    assert all(stride % 16 == 0 for stride in (*query_map.strides, *rotary.strides))


def test_maps_follow_the_arrays(hopper: FakeDriver, cubins: CubinCache) -> None:
    """Other arrays, other maps; arrays seen before, no work; and no launch with the maps of another run."""
    call = call_of()
    op = operator(hopper, call, cubins)
    first, second = operands_of(call, op.device), operands_of(call, op.device, blocks=5)
    seen = {}
    for operands, encoded in ((first, 2), (first, 2), (second, 4), (first, 4), (second, 4)):
        op.run(**operands, stream=7)
        assert hopper.calls["encode_tensor_map"] == encoded
        assert seen.setdefault(id(operands), bytes(numbers_of(op))) == bytes(numbers_of(op))
    second = operands_of(call, op.device, blocks=6)
    hopper.failing["encode_tensor_map"] = 1
    launched = len(hopper.launched)
    with pytest.raises(DriverError, match="encode_tensor_map"):
        op.run(**second, stream=7)
    assert len(hopper.launched) == launched
    op.run(**second, stream=7)
    assert maps_of(op, hopper)[0].address == second["key_cache"].pointer
    assert len(hopper.launched) == launched + 4


@pytest.mark.parametrize(("terms", "tiles"), [(None, 31), (1, 0), (2, (2**31 - 1) // 32)])
def test_weights_have_the_terms_asked_for(
    terms: int | None, tiles: int, hopper: FakeDriver, cubins: CubinCache
) -> None:
    call = call_of()
    op = operator(hopper, call, cubins, weight_terms=terms)
    op.run(**operands_of(call, op.device), stream=7)
    assert op._params.slow_tiles == tiles


@pytest.mark.parametrize(
    ("sizes", "least", "item", "slow"),
    [((576, 512), 4, 12, 6), ((384, 192), 2, 9, 5), ((192, 128), 2, 9, 4)],
)
def test_the_schedule_is_told_the_least_slice_and_what_an_item_and_a_slow_tile_cost(
    sizes: tuple[int, int], least: int, item: int, slow: int
) -> None:
    """A slice has at least 128 keys, half of them in small steps. In thirds, an item costs four tiles of 32
    keys or three of 64; a slow tile costs two of 32 keys, 5/3 of 64, 4/3 where two warpgroups compute
    scores."""
    for bounds, tiles in ((Bounds(4, 4, 65_536), least), (Bounds(1, 1, 4096), least // 2)):
        told = choose_path(call_of(64, *sizes), bounds, HOPPER, kernel="sm90").attend.constants
        assert (told["min_tiles"], told["item_cost"], told["slow_cost"]) == (tiles, item, slow)


@pytest.mark.parametrize(
    ("heads", "bounds", "slices", "grid"),
    [
        (64, Bounds(1, 1, 16_896), 66, 128),
        (64, Bounds(1, 1, 2048), 32, 128),
        (64, Bounds(8, 8, 1024), 66, 128),
        (128, Bounds(1, 1, 4096), 33, 128),
        (128, Bounds(2, 2, 2048), 33, 128),
        (128, Bounds(3, 3, 1024), 33, 96),
        (40, Bounds(1, 1, 1), 1, 256),
    ],
)
def test_small_steps_leave_half_of_the_multiprocessors_to_combine(
    heads: int, bounds: Bounds, slices: int, grid: int
) -> None:
    """All blocks of combine, two a multiprocessor, then find a place beside those of attend."""
    plan = choose_path(call_of(heads, 576, 512), bounds, HOPPER, kernel="sm90").launches
    attend, combine = plan[-2], plan[-1]
    row_tiles = -(-heads // 64)
    assert attend.grid[:2] == (row_tiles, slices)
    assert combine.grid[0] == grid <= 2 * (HOPPER.multiprocessors - row_tiles * slices)


@pytest.mark.parametrize(
    ("heads", "bounds", "options"),
    [
        (64, Bounds(1, 1, 16_897), PathOptions()),
        (128, Bounds(1, 1, 4225), PathOptions()),
        (64, Bounds(1, 2, 16_384), PathOptions()),
        (64, Bounds(1, 1, 4096), PathOptions(split_rows=512)),
    ],
)
def test_larger_steps_and_fixed_splits_take_all_multiprocessors(
    heads: int, bounds: Bounds, options: PathOptions
) -> None:
    plan = choose_path(call_of(heads, 576, 512), bounds, HOPPER, kernel="sm90", options=options)
    assert plan.attend.constants["slices"] == HOPPER.multiprocessors // -(-heads // 64)


def test_an_operator_says_that_attend_leaves_places_to_combine(
    hopper: FakeDriver, cubins: CubinCache
) -> None:
    def told(bounds: Bounds) -> str:
        device = Device(hopper, 0)
        return str(PagedAttention(call_of(), bounds, device=device, cache=cubins, kernel="sm90").explain())

    blocks = hopper.properties(0).multiprocessors
    text = told(Bounds(1, 1, 64 * (blocks // 2)))
    assert f"{blocks // 2} of {blocks} places of blocks, the others for combine" in text
    assert f"{blocks // 2} x 512 threads" in text
    text = told(Bounds(8, 8, 65_536))
    assert "places of blocks" not in text
    assert f"{blocks} x 512 threads" in text


def test_a_line_has_a_block_to_itself_only_where_combine_is_apart() -> None:
    def constants(bounds: Bounds, heads: int) -> dict[str, int]:
        plan = choose_path(call_of(heads), bounds, HOPPER, kernel="sm90").launches
        return dict(plan[-1].signature.constants)

    large, small = constants(Bounds(8, 8, 65_536), 64), constants(Bounds(2, 2, 2048), 128)
    assert (large["COLUMN_PARTS"], large["WORKER"]) == (4, 32)
    assert (small["COLUMN_PARTS"], small["WORKER"]) == (1, 256)


@pytest.mark.parametrize(("context", "slices"), [(993, 66), (994, 132)])
def test_tokens_that_share_an_item_do_not_make_a_step_larger(context: int, slices: int) -> None:
    """Of 17 tokens of 16 heads there are at most 17 items, though 22 have a place in the list."""
    plan = choose_path(call_of(16), Bounds(17, 17, context), HOPPER, kernel="sm90").attend
    assert plan.constants["slices"] == slices
    assert plan.constants["max_items"] == 17 + 5


def test_few_multiprocessors_are_not_divided_among_more_row_tiles() -> None:
    assert Apart(most_rows=256, min_rows=64).slices(1, 31, 16) == 0
    assert Apart(most_rows=256, min_rows=64).slices(1, 32, 16) == 1
    assert Apart(most_rows=256, min_rows=64).slices(65, 132, 1) == 2


def test_small_steps_have_no_more_slices_than_the_schedule_keeps() -> None:
    assert Apart(most_rows=10**9, min_rows=64).slices(10**6, 4 * MAX_SLICES, 1) == MAX_SLICES


def test_all_who_count_or_ask_decide_alike_whether_blocks_are_kept_level() -> None:
    """Else the loading warp would wait for ever for a warp that has left, or a launch would miscount."""
    source = kernel_source("sm90_latent.cu")
    assert "const bool paced = one_tile_reads(p, kRows);" in source
    assert "if (kLead && paced) ask_leave(" in source
    assert "else if (warp == 14 && one_tile_reads(p, kRows)) {" in source
    assert "if (thread == 0 && one_tile_reads(p, kRows)) start_block(p);" in source


def test_a_cost_is_bounded_by_the_longest_slow_item_or_the_longest_of_all() -> None:
    costs = Costs(min_rows=128, item_rows=128, slow_rows=992, slow_tile=6)
    assert costs.most(31, 32) == 12 + 31 * 6
    assert costs.most(40, 32) == 12 + 31 * 6
    assert costs.most(100, 32) == 12 + 100 * 3


@pytest.mark.parametrize(
    ("rotary", "slabs"),
    [
        (None, (0, 0)),
        ((512, 64), (512, 64)),
        ((480, 48), (448, 128)),
        ((8, 16), (0, 64)),
        ((0, 576), (0, 576)),
    ],
)
def test_rotated_channels_are_whole_slabs(rotary: tuple[int, int] | None, slabs: tuple[int, int]) -> None:
    assert rotated_slabs(call_of(rotary=rotary)) == slabs
