"""The split path's host side: what runs, in what order, over how much memory, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_cuda import ArgumentMismatch, Bounds, Device, PagedAttention
from paged_cuda.compiler import compile_kernels
from paged_cuda.launch_plan import PathOptions, PathPlan
from paged_cuda.paths import choose_path
from paged_cuda.signature import ElementType
from paged_cuda.sources import kernel_source
from paged_cuda.split_path import SplitPath
from paged_cuda.split_plan import (
    MAX_SLICES,
    PAIRED_PARTIALS,
    ROW_PARTIALS,
    TALL_PARTIALS,
    Apart,
    CombineShape,
    Partials,
    SplitSizes,
    padded_v_head_size,
)
from paged_cuda.split_shape import ROW_TILES, NarrowShape, SplitShape, shapes_for
from paged_cuda.testing import FAKE_GPU, FakeDriver
from paged_cuda.variants import VARIANTS
from paged_cuda.workspace import Workspace
from paged_schema import Call, PagedAttentionAttributes, PagedAttentionInputs, check

Make = Callable[..., Any]
BOUNDS = Bounds(max_batch=4, max_tokens=16, max_context=64)


def call_of(heads: int, head_size: int, v_head_size: int) -> Call:
    attributes = PagedAttentionAttributes(
        num_heads=heads, kv_num_heads=1, kv_cache_layout="LATENT", v_head_size=v_head_size, scale=0.1
    )
    inputs = PagedAttentionInputs(
        query=f"bf16[t, {heads * head_size}]",
        key=f"bf16[t, {head_size}]",
        key_cache=f"bf16[n, 16, 1, {head_size}]",
        cumulative_sequence_length="i32[b1]",
        past_seqlens="i32[b]",
        block_table="i32[b, m]",
    )
    return check(attributes, inputs)


def test_a_step_is_append_schedule_attend_combine(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op: PagedAttention = make_operator(call, kernel="sm80").prepare()
    operands = make_operands(call)
    driver.calls.clear()
    op.run(**operands, stream=7)
    kernels = [launch.symbol.split("_bf16")[0] for launch in driver.launched]
    assert kernels == ["append", "schedule", "sm80_latent_narrow", "combine"]
    assert driver.calls["allocate"] == driver.calls["synchronize"] == 0


def test_a_reused_schedule_is_not_made_again(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op: PagedAttention = make_operator(call, kernel="sm80").prepare()
    op.run(**make_operands(call), stream=7)
    op.run(**make_operands(call), reuse_schedule=True, stream=7)
    again = [launch.symbol.split("_bf16")[0] for launch in driver.launched[4:]]
    assert again == ["append", "sm80_latent_narrow", "combine"]
    first, second = driver.launched[2].params, driver.launched[5].params
    assert first != second  # the second is told that the schedule was settled before append
    # A first layer's append waits for all before it, as the schedule reads what that may still write.
    assert [launch.programmatic for launch in driver.launched] == [False, *(True,) * 6]


def test_a_schedule_that_is_not_there_is_not_reused(
    driver: FakeDriver, device: Device, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    """A first run, other extents, or another operator on the workspace since: refused before any launch."""
    call = make_call()
    workspace = Workspace(device, 2**24)
    one, other = (make_operator(call, kernel="sm80", workspace=workspace).prepare() for _ in range(2))
    long, short = make_operands(call), make_operands(call, tokens=1)
    for before, operands in (
        ((), long),
        (((one, long),), short),
        (((one, long), (other, long)), long),
    ):
        workspace.schedule = None
        for operator, earlier in before:
            operator.run(**earlier, stream=7)
        launched = len(driver.launched)
        with pytest.raises(ArgumentMismatch, match="reuse_schedule"):
            one.run(**operands, reuse_schedule=True, stream=7)
        assert len(driver.launched) == launched
    one.run(**long, stream=7)
    one.run(**long, reuse_schedule=True, stream=7)


def test_a_step_of_more_tiles_than_are_counted_is_refused() -> None:
    with pytest.raises(ArgumentMismatch, match="KV tiles"):
        choose_path(call_of(64, 576, 512), Bounds(1, 400_000, 400_000), FAKE_GPU, kernel="sm80")


def test_auto_takes_tensor_cores_and_says_so(make_call: Make, make_operator: Make) -> None:
    explanation = make_operator(make_call(), kernel="auto").explain()
    assert explanation.path in ("sm80", "sm90")
    assert "row tile" in str(explanation)


@pytest.mark.parametrize(
    ("call", "options", "word"),
    [
        (call_of(4, 648, 8), PathOptions(), "640"),
        (call_of(4, 64, 64), PathOptions(debug=True), "debug"),
    ],
)
def test_what_tensor_cores_refuse_goes_to_the_baseline(call: Call, options: PathOptions, word: str) -> None:
    step = choose_path(call, BOUNDS, FAKE_GPU, options=options)
    assert step.path == "baseline"
    assert word in step.reason
    with pytest.raises(ArgumentMismatch):
        choose_path(call, BOUNDS, FAKE_GPU, kernel="sm80", options=options)


@pytest.mark.parametrize(
    "options",
    [
        PathOptions(row_tile=17),
        PathOptions(split_rows=40),
    ],
)
def test_options_that_do_not_exist(options: PathOptions) -> None:
    with pytest.raises(ArgumentMismatch):
        choose_path(call_of(4, 64, 64), BOUNDS, FAKE_GPU, kernel="sm80", options=options)


def test_rows_beyond_int32_are_refused() -> None:
    wide = Bounds(max_batch=1, max_tokens=2**28 - 1, max_context=64)
    with pytest.raises(ArgumentMismatch, match="max_tokens"):
        choose_path(call_of(128, 64, 64), wide, FAKE_GPU, kernel="sm80")


@pytest.mark.parametrize("row_tile", ROW_TILES)
def test_every_row_tile_can_be_asked_for(row_tile: int) -> None:
    step = choose_path(call_of(16, 576, 512), BOUNDS, FAKE_GPU, options=PathOptions(row_tile=row_tile))
    assert step.attend.constants["row_tile"] == row_tile


def test_small_gpus_get_a_tile_that_fits() -> None:
    """99 KB a block, as on sm_86, sm_89 and sm_120."""
    small = replace(FAKE_GPU, shared_bytes=101_376, shared_bytes_multiprocessor=102_400)
    step = choose_path(call_of(128, 576, 512), BOUNDS, small)
    assert step.path == "sm80"
    assert max(spec.shared_bytes for spec in step.launches) <= 101_376
    tiny = replace(FAKE_GPU, shared_bytes=65_536, shared_bytes_multiprocessor=65_536)
    assert choose_path(call_of(16, 576, 512), BOUNDS, tiny).path == "baseline"


def test_workspace_does_not_grow_with_the_context() -> None:
    path, call = SplitPath(), call_of(16, 576, 512)
    short, long = (
        path.plan(call, Bounds(8, 8, context), FAKE_GPU, PathOptions()).workspace.nbytes
        for context in (64, 131_072)
    )
    assert short == long


def assert_room(plan: PathPlan, slots: int, rows: int, fact_bytes: int) -> None:
    """Assert that so many slots of so many rows have room, of 200 value columns padded to 256."""
    assert plan.constants["row_tiles"] * plan.constants["row_tile"] == rows
    assert plan.workspace.nbytes_of("partial_output") == slots * rows * 256 * 2
    assert plan.workspace.nbytes_of("partial_facts") == slots * rows * fact_bytes


@pytest.mark.parametrize(
    ("kernel", "row_tile", "rows", "fact_bytes"),
    [("sm80", 16, 80, 64), ("sm80", 32, 96, 64), ("sm90", None, 128, 16)],
)
def test_every_slot_has_room_for_its_rows(
    kernel: str, row_tile: int | None, rows: int, fact_bytes: int
) -> None:
    """Two slots a slice, each of whole row tiles of 72 heads."""
    gpu = replace(FAKE_GPU, capability=(9, 0), multiprocessors=132)
    call, options = call_of(72, 256, 200), PathOptions(row_tile=row_tile)
    plan = choose_path(call, Bounds(8, 8, 4096), gpu, kernel=kernel, options=options).attend
    assert_room(plan, 2 * plan.constants["slices"], rows, fact_bytes)


@pytest.mark.parametrize(("kernel", "rows", "fact_bytes"), [("sm80", 96, 64), ("sm90", 128, 16)])
def test_a_fixed_split_has_room_for_every_part(kernel: str, rows: int, fact_bytes: int) -> None:
    """More parts than two a slice: each of 64 tokens may have one for every 256 keys."""
    gpu = replace(FAKE_GPU, capability=(9, 0), multiprocessors=132)
    call, options = call_of(72, 256, 200), PathOptions(split_rows=256)
    plan = choose_path(call, Bounds(64, 64, 65_536), gpu, kernel=kernel, options=options).attend
    slots = plan.constants["max_parts"]
    assert slots >= 64 * 65_536 // 256 > 2 * plan.constants["slices"]
    assert_room(plan, slots, rows, fact_bytes)


SIZES = st.builds(
    SplitSizes.of,
    st.integers(1, 1024),
    st.builds(Bounds, st.integers(1, 5000), st.integers(1, 9000), st.integers(1, 200_000)),
    st.sampled_from([SplitShape(16, 32, 4), NarrowShape(8), SplitShape(64, 16, 5, producer_warps=0)]),
    blocks=st.integers(1, 600),
    split_rows=st.sampled_from([0, 64, 1024]),
    apart=st.sampled_from([None, Apart(256, 64), Apart(100_000, 64)]),
)


@given(sizes=SIZES)
def test_sizes_cover_the_bounds(sizes: SplitSizes) -> None:
    assert 1 <= sizes.slices <= MAX_SLICES
    assert ROW_PARTIALS.lines(sizes.item_rows) == sizes.item_rows
    assert 2 * PAIRED_PARTIALS.lines(sizes.item_rows) >= sizes.item_rows
    assert sizes.slots >= (sizes.max_items if sizes.chunk else 2 * sizes.slices)
    assert sizes.left == 0 or sizes.left >= sizes.slices * sizes.row_tiles


@given(
    queries=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    heads=st.integers(1, 200),
    row_tile=st.sampled_from([16, 32, 64]),
)
def test_every_item_has_a_place(queries: list[int], heads: int, row_tile: int) -> None:
    """A request's tokens fill items of their own; what has no place in the list is not computed."""
    bounds = Bounds(len(queries), sum(queries), 64)
    sizes = SplitSizes.of(heads, bounds, SplitShape(row_tile, 32, 4), blocks=132, split_rows=0)
    assert sum(-(-tokens * heads // max(heads, row_tile)) for tokens in queries) <= sizes.max_items


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
@pytest.mark.parametrize("bounds", [Bounds(1, 1, 4096), Bounds(7, 40, 65_536)])
def test_the_schedules_lists_have_room(kernel: str, bounds: Bounds) -> None:
    gpu = replace(FAKE_GPU, capability=(9, 0), multiprocessors=132)
    plan = choose_path(call_of(16, 576, 512), bounds, gpu, kernel=kernel).attend
    told, room = plan.constants, plan.workspace.nbytes_of
    assert room("starts") >= 64 * (told["slices"] + 1)
    assert room("items") >= 32 * told["max_items"]
    assert room("item_begin") >= 4 * told["max_items"]
    assert room("request_begin") >= 4 * bounds.max_batch
    assert room("splits") >= 32 * (told["slices"] + bounds.max_batch + 2 + told["combine_entries"])


@given(
    sizes=SIZES,
    v_head_size=st.integers(1, 640),
    most=st.integers(1, 800),
    partials=st.sampled_from([ROW_PARTIALS, TALL_PARTIALS, PAIRED_PARTIALS]),
)
def test_combine_workers_stay_inside_the_list(
    sizes: SplitSizes, v_head_size: int, most: int, partials: Partials
) -> None:
    """A worker reads its first entry of the list, and from a live one the entry of its next task."""
    lines = partials.lines(sizes.item_rows)
    shape = CombineShape.of(sizes.cut_items * lines, v_head_size, most, partials, apart=sizes.left > 0)
    columns = padded_v_head_size(v_head_size) // shape.column_parts
    assert columns % 16 == 0
    assert columns * shape.column_parts == padded_v_head_size(v_head_size)
    assert shape.worker == partials.threads or columns % 128 == 0
    assert 1 <= shape.grid <= most * partials.blocks[-1]
    workers = shape.grid * partials.threads // shape.worker
    assert -(-workers // (lines * shape.column_parts)) < sizes.combine_entries


def test_few_rows_are_cut_finely_and_many_are_not() -> None:
    for partials, shapes in {
        ROW_PARTIALS: {
            16: (8, 128, 128),
            64: (2, 128, 128),
            128: (4, 32, 128),
            512: (1, 32, 128),
            1024: (1, 32, 256),
            4096: (1, 32, 264),
        },
        TALL_PARTIALS: {64: (8, 128, 512), 128: (4, 128, 512), 4096: (1, 32, 528)},
        PAIRED_PARTIALS: {32: (8, 256, 256), 64: (4, 256, 256), 512: (4, 32, 256), 4096: (1, 32, 264)},
    }.items():
        for lines, (column_parts, worker, grid) in shapes.items():
            assert CombineShape.of(lines, 512, 132, partials) == CombineShape(column_parts, worker, grid)
    assert CombineShape.of(256, 128, 132, ROW_PARTIALS) == CombineShape(1, 32, 64)
    assert CombineShape.of(128, 384, 132, ROW_PARTIALS) == CombineShape(1, 32, 32)


def test_half_a_warp_takes_a_narrow_row_where_warps_would_not_all_find_a_place_beside_attend() -> None:
    assert CombineShape.of(512, 128, 132, ROW_PARTIALS) == CombineShape(1, 32, 128)
    assert CombineShape.of(1024, 128, 132, ROW_PARTIALS) == CombineShape(1, 16, 128)
    assert CombineShape.of(1024, 256, 132, ROW_PARTIALS) == CombineShape(1, 32, 256)
    for lines, grid in ((1024, 256), (2200, 528)):
        assert CombineShape.of(lines, 128, 132, TALL_PARTIALS) == CombineShape(1, 32, grid)
    shipped = [dict(v.signature.constants) for v in VARIANTS if v.signature.kernel == "combine"]
    assert {c["ROW_TILE"] for c in shipped if c["WORKER"] == 16} == {16}


@pytest.mark.parametrize(
    ("kernel", "row_tile", "partials"),
    [("sm80", 16, ROW_PARTIALS), ("sm80", 32, TALL_PARTIALS), ("sm90", None, PAIRED_PARTIALS)],
)
def test_a_path_launches_the_combine_kernel_of_its_partials(
    kernel: str, row_tile: int | None, partials: Partials, make_call: Make
) -> None:
    """As many blocks as the lines that may be cut ask for, and the shared memory that the kernel lays out."""
    gpu = replace(FAKE_GPU, capability=(9, 0), multiprocessors=132)
    call, batch = make_call(heads=64, head_size=576, v_head_size=512), 40
    options = PathOptions(row_tile=row_tile)
    step = choose_path(call, Bounds(batch, batch, 65_536), gpu, kernel=kernel, options=options)
    combine = step.launches[-1]
    shape = CombineShape.of(min(batch, 132) * partials.lines(64), 512, 132, partials)
    assert combine.signature.kernel == partials.combine
    assert (combine.grid[0], combine.block[0], combine.shared_bytes) == (
        shape.grid,
        partials.threads,
        partials.shared_bytes,
    )
    assert dict(combine.signature.constants).get("SHARED_BYTES", 0) == partials.shared_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [(576, 512), (192, 128), (160, 128)])
def test_attend_leaves_room_for_a_block_of_combine(sizes: tuple[int, int], dtype: ElementType) -> None:
    """Both wait on one Hopper multiprocessor: 64 K registers, eight at least for each thread, and 228 KB."""
    shape = shapes_for(16, *sizes, shared_bytes=232_448, shared_bytes_multiprocessor=233_472)[0]
    (attend,) = compile_kernels([(shape.signature(dtype, *sizes), "sm_90a")])
    combine = {
        v.max_registers
        for v in VARIANTS
        if v.signature.kernel == "combine"
        and {("ROW_TILE", 16), ("V_HEAD_SIZE", sizes[1])} <= set(v.signature.constants)
    }
    own = -(-attend.resources.registers // 8) * 8
    assert own * shape.threads + max(combine) * ROW_PARTIALS.threads <= 65_536
    static = 5120  # of combine, at most
    assert shape.shared_bytes(*sizes) + static + 2 * 1024 <= 233_472


@pytest.mark.parametrize(
    ("tokens", "batch", "heads", "rows", "alone"),
    [
        (128, 128, 64, 64, True),
        (128, 128, 65, 64, False),
        (129, 128, 64, 64, False),
        (512, 1, 8, 64, False),
        (2, 1, 16, 16, False),
        (1, 1, 16, 16, True),
        (2**20, 2**14, 2**11, 64, False),
    ],
)
def test_one_row_tile_reads_the_keys_of_a_decode_with_few_heads(
    tokens: int, batch: int, heads: int, rows: int, alone: bool
) -> None:
    """The rule of the kernels, from the extents of a run; 64 bits hold the products."""
    rule = re.search(
        r"bool one_tile_reads\(.*?\) \{ return \(i64\)p\.(\w+) \* p\.(\w+) <= \(i64\)p\.(\w+) \* rows; \}",
        kernel_source("layout/schedule.cuh"),
    )
    assert rule is not None
    named = {"tokens": tokens, "num_heads": heads, "batch": batch}
    assert (named[rule[1]] * named[rule[2]] <= named[rule[3]] * rows) == alone


@given(
    head=st.integers(1, 80).map(lambda n: 8 * n),
    shared=st.integers(48, 227).map(lambda kb: 1024 * kb),
    row_tile=st.sampled_from(ROW_TILES),
    data=st.data(),
)
def test_shapes_fit_what_they_are_given(head: int, shared: int, row_tile: int, data: st.DataObject) -> None:
    v_head = data.draw(st.integers(1, head))
    for shape in shapes_for(
        row_tile, head, v_head, shared_bytes=shared, shared_bytes_multiprocessor=shared + 1024
    ):
        assert shape.row_tile == row_tile
        assert shape.shared_bytes(head, v_head) <= shared


@pytest.mark.parametrize(
    "options",
    [
        {"split_rows": -32},
        {"split_rows": 2**40},
        {"split_rows": 32.0},
        {"split_rows": "32"},
        {"split_rows": None},
        {"row_tile": 16.0},
        {"row_tile": "16"},
        {"row_tile": True},
        {"weight_terms": 0},
        {"weight_terms": 3},
        {"weight_terms": "2"},
    ],
)
@pytest.mark.parametrize("kernel", ["auto", "baseline"])
def test_numbers_of_the_wrong_kind_or_range_are_refused(
    options: dict[str, Any], kernel: str, make_call: Make, make_operator: Make
) -> None:
    """A negative split would size the workspace below what the kernels write."""
    with pytest.raises(ArgumentMismatch) as caught:
        make_operator(make_call(), kernel=kernel, **options)
    assert caught.value.subject == next(iter(options))


def test_no_tile_for_a_gpu_with_little_shared_memory_means_the_baseline() -> None:
    tiny = replace(FAKE_GPU, shared_bytes=49_152, shared_bytes_multiprocessor=65_536)
    call = call_of(16, 576, 512)
    step = choose_path(call, BOUNDS, tiny)
    assert step.path == "baseline"
    assert "no tile fits 49152 bytes" in step.reason
    with pytest.raises(ArgumentMismatch, match="has no row tiles"):
        choose_path(call, BOUNDS, tiny, options=PathOptions(row_tile=16))


def test_a_row_tile_too_tall_for_the_gpu_is_refused_and_never_chosen() -> None:
    small = replace(FAKE_GPU, shared_bytes=101_376, shared_bytes_multiprocessor=102_400)
    call = call_of(64, 576, 512)
    assert choose_path(call, BOUNDS, small).attend.constants["row_tile"] == 16
    with pytest.raises(ArgumentMismatch, match="shared memory"):
        choose_path(call, BOUNDS, small, options=PathOptions(row_tile=64))
