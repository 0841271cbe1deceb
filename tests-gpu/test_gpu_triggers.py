"""Shapes and modes that users of paged MLA kernels have reported as broken, and the edges between them."""

import numpy as np
import pytest
from paged_cuda import Bounds, DeviceArray, PagedAttention, Stream
from paged_cuda.workspace import Workspace
from parity import (
    assert_parity,
    bits,
    call_of,
    paths_for,
    poison_workspace,
    poisoned,
    reference,
    run,
    upload,
)
from problems import Case, build

DTYPES = ("bfloat16", "float16")
DIMS = {
    "576/512": {"head_size": 576, "v_head_size": 512},
    "512/512 no rotary": {"head_size": 512, "v_head_size": 512, "rotary_dim": 0},
    "448/384": {"head_size": 448, "v_head_size": 384},
    "384/192": {"head_size": 384, "v_head_size": 192, "rotary_dim": 192},
    "320/256": {"head_size": 320, "v_head_size": 256},
    "320/128": {"head_size": 320, "v_head_size": 128},
    "256/128": {"head_size": 256, "v_head_size": 128},
    "192/128": {"head_size": 192, "v_head_size": 128},
    "128/128": {"head_size": 128, "v_head_size": 128},
    "512/64": {"head_size": 512, "v_head_size": 64},
    "192/100": {"head_size": 192, "v_head_size": 100},
    "160/128": {"head_size": 160, "v_head_size": 128, "rotary_dim": 32},
    "64/64": {"head_size": 64, "v_head_size": 64, "rotary_dim": 16, "rotary_offset": 24},
    "24/8": {"head_size": 24, "v_head_size": 8, "rotary_dim": 0},
    "640/1": {"head_size": 640, "v_head_size": 1},
    "2048/2048": {"head_size": 2048, "v_head_size": 2048, "rotary_dim": 0},
}
MODES = {
    "softcap 50": {"softcap": 50.0, "spread": 6.0},
    "softcap 1": {"softcap": 1.0, "spread": 3.0},
    "window 1": {"window": 1},
    "window 2": {"window": 2},
    "window page-1": {"window": 63},
    "window 128": {"window": 128},
    "window beyond": {"window": 10_000},
    "window and softcap": {"window": 40, "softcap": 30.0, "spread": 4.0},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window": 9},
    "interleaved": {"interleaved": True},
    "rotary in front": {"rotary_offset": 0},
    "rotary inside": {"rotary_offset": 8, "rotary_dim": 48},
    "whole row rotates": {"rotary_offset": 0, "rotary_dim": 576},
    "whole row, interleaved": {"rotary_offset": 0, "rotary_dim": 576, "interleaved": True},
    "no rotary": {"rotary_dim": 0},
    "default scale": {"scale": None, "v_head_size": 576},
    "slots": {"slots": True},
    "skipped slots": {"slots": True, "skipped": (0, 3, 9)},
    "hole": {"holes": ((2, 0), (3, 1))},
    "window inside a hole": {"window": 4, "holes": ((0, 2), (3, 1))},
    "table exactly full": {"spare_columns": 0, "spare_blocks": 0},
    "everything unmapped": {"holes": ((1, 0), (2, 0), (2, 1), (2, 2))},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 1024])
def test_lengths_around_page_and_tile(dtype: str, block_size: int, stream: Stream) -> None:
    edges = sorted(
        {block_size - 1, block_size, block_size + 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2 * block_size}
    )
    case = Case((1,) * len(edges), tuple(edge - 1 for edge in edges), dtype, heads=3, block_size=block_size)
    assert_parity("page and tile edges", build(case), stream)


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 16, 20, 24, 40, 48, 63, 64, 96, 126, 128, 1024])
def test_head_counts(heads: int, stream: Stream) -> None:
    case = Case((1, 2), (70, 5), heads=heads, head_size=192, v_head_size=128, seed=heads)
    assert_parity("head counts", build(case), stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DIMS)
def test_head_sizes(dtype: str, name: str, stream: Stream) -> None:
    for block_size in (16, 64):
        case = Case((1, 3, 0, 17), (130, 20, 7, 0), dtype, heads=5, block_size=block_size, **DIMS[name])
        assert_parity(f"head sizes: {name}", build(case), stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODES)
def test_modes(dtype: str, name: str, stream: Stream) -> None:
    case = Case((1, 7, 0, 12, 2), (140, 0, 131, 65, 63), dtype, **{"heads": 4, **MODES[name]})
    assert_parity(f"modes: {name}", build(case), stream)


@pytest.mark.parametrize("window", [-1, 4])
@pytest.mark.parametrize("scale", [3e5, 4e8, 1e12])
@pytest.mark.parametrize("name", ["576/512", "192/128"])
def test_a_huge_scale_picks_one_key(name: str, scale: float, window: int, stream: Stream) -> None:
    """Rows see no key of some tiles, and -1e30 times such a scale would be no number."""
    case = Case((70, 1), (0, 63), heads=4, scale=scale, window=window, spread=4.0, **DIMS[name])
    problem = build(case)
    want = reference(problem)
    for kernel in paths_for(call_of(problem), stream.device):
        np.testing.assert_array_equal(bits(run(problem, stream, kernel).output), bits(want.output), kernel)


@pytest.mark.parametrize("q", [1, 2, 3, 4, 5, 6, 7, 8, 16, 63, 64, 65])
def test_query_lengths(q: int, stream: Stream) -> None:
    """Speculative rows and prefill: each token sees up to itself."""
    case = Case((q, 1, q), (0, 33, 100), heads=4, head_size=192, v_head_size=128, seed=q)
    assert_parity("query lengths", build(case), stream)


@pytest.mark.parametrize(("heads", "q"), [(16, 4), (16, 5), (13, 5), (80, 1), (1, 64), (1, 65), (1, 80)])
def test_row_counts_around_a_tile(heads: int, q: int, stream: Stream) -> None:
    assert_parity("rows 64, 65, 80", build(Case((q, q), (200, 0), heads=heads)), stream)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_sequences_everywhere(dtype: str, stream: Stream) -> None:
    for q, past in (
        ((0, 0, 3, 0, 1, 0), (5, 0, 9, 64, 0, 0)),
        ((0, 0), (3, 0)),
        ((0,), (0,)),
        ((1, 0), (0, 0)),
    ):
        assert_parity("empty sequences", build(Case(q, past, dtype, heads=4)), stream)


def test_imbalanced_lengths(stream: Stream) -> None:
    case = Case((1, 1, 1, 1), (4640, 45117, 1729, 1695), heads=4)
    assert_parity("imbalanced lengths", build(case), stream)


def test_a_long_prefill_mixed_with_decode(stream: Stream) -> None:
    case = Case((300, 1, 1, 40), (0, 700, 63, 600), heads=8, head_size=192, v_head_size=128)
    assert_parity("prefill and decode", build(case), stream)


@pytest.mark.parametrize("heads", [1, 16])
def test_a_long_sequence_alone_and_in_a_crowd(heads: int, stream: Stream) -> None:
    """Each slice of one sequence, and one sequence that is longer than all others together."""
    shape = {"heads": heads, "head_size": 192, "v_head_size": 128}
    assert_parity("long sequences", build(Case((1,), (131_071,), **shape)), stream)
    assert_parity("long sequences", build(Case((1,) * 128, (65_535, *range(127)), **shape)), stream)


def test_more_sequences_than_the_schedule_keeps_in_shared_memory(stream: Stream) -> None:
    for batch in (257, 1025, 4500):
        past = tuple(n % 19 for n in range(batch))
        q = tuple(int(n % 7 != 3) for n in range(batch))
        case = Case(q, past, heads=2, head_size=64, v_head_size=64, rotary_dim=16, block_size=16)
        assert_parity("many sequences", build(case), stream)


def test_full_tables_of_whole_pages(stream: Stream) -> None:
    """Every sequence ends with its table's last row."""
    case = Case((1, 4, 64), (127, 124, 64), heads=8, block_size=32, spare_columns=0, spare_blocks=0)
    assert_parity("tables exactly full", build(case), stream)


def test_empty_sequences_with_unmapped_pages(stream: Stream) -> None:
    for q in ((0, 1, 0), (0, 0, 0)):
        problem = build(Case(q, (0, 40, 70), heads=4, block_size=16))
        table = problem.inputs["block_table"].copy()
        table[[0, 2]] = -1
        assert_parity("empty sequences on no page", problem.changed(block_table=table), stream)


def test_lengths_that_fall_are_no_fault(stream: Stream) -> None:
    """ONNX Runtime does not define them; nothing outside the arrays is touched, and every output is set."""
    problem = build(Case((2, 3), (30, 5), heads=4, block_size=16))
    starts = problem.inputs["cumulative_sequence_length"].copy()
    for values in ([0, 5, 3], [3, 1, 5], [5, 0, 0]):
        starts[:] = values
        changed = problem.changed(cumulative_sequence_length=starts)
        for kernel in paths_for(call_of(changed), stream.device):
            got = run(changed, stream, kernel)
            assert np.isfinite(got.output.astype(np.float32)).all()


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(("batch", "past"), [(2, 31_999), (3, 21_999), (6, 10_999)])
def test_equal_long_sequences_whose_last_piece_is_short(
    heads: int, batch: int, past: int, stream: Stream
) -> None:
    """Their cuts were once put behind the end of a sequence, into the next one."""
    case = Case((1,) * batch, (past,) * batch, heads=heads, head_size=192, v_head_size=128)
    assert_parity("equal long sequences", build(case), stream)


def test_lengths_beyond_the_bounds_stay_inside_the_workspace(stream: Stream) -> None:
    """A fixed split has a slot a part; a length that nobody announced has more parts than there are slots."""
    problem = build(Case((1,), (6_399,), heads=16, head_size=192, v_head_size=128, rotary_dim=0))
    bounds = Bounds(1, 1, 64)
    for kernel in paths_for(call_of(problem), stream.device):
        if kernel == "baseline":
            continue
        options = {"device": stream.device, "kernel": kernel, "split_rows": 64}
        needed = PagedAttention(call_of(problem), bounds, **options).workspace_bytes
        workspace = Workspace(stream.device, needed + 2**25)
        op = PagedAttention(call_of(problem), bounds, workspace=workspace, **options).prepare()
        poison_workspace(op, stream)
        op.run(**upload(problem, stream), output=poisoned((1, 16 * 128), "bfloat16", stream), stream=stream)
        behind = DeviceArray(
            workspace.pointer + needed, (2**25,), (1,), "uint8", stream.device.ordinal, workspace
        )
        assert (behind.to_numpy(stream) == 0xFF).all(), kernel
