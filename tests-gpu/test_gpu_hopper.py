"""What only the Hopper path has: tensor maps of every geometry, roles that race if a fence is missing."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from paged_cuda import CapturedGraph, DeviceArray, PagedAttention, Stream
from parity import (
    assert_close,
    assert_close_but_for_weights,
    assert_parity,
    bounds_of,
    call_of,
    paths_for,
    poisoned,
    reference,
    run,
    upload,
)
from problems import Case, build

REPLAYS = int(os.environ.get("PAGED_STRESS_REPLAYS", "100000"))
BATCHES = 8
NARROW_BATCHES = 4


def require(stream: Stream, case: Case) -> None:
    if "sm90" not in paths_for(call_of(build(case)), stream.device):
        pytest.skip("the GPU is no Hopper")


@pytest.mark.parametrize("past", [300, 5000])
@pytest.mark.parametrize(
    ("heads", "sizes", "offset", "width"),
    [
        (64, (576, 512), 512, 64),  # whole slabs, last
        (24, (576, 512), 480, 48),  # part of a slab
        (24, (576, 512), 128, 64),  # a slab in the middle
        (40, (576, 512), 0, 32),
        (16, (384, 192), 192, 192),
        (64, (160, 128), 128, 32),
        (12, (192, 100), 128, 64),
        (65, (320, 256), 0, 320),  # all of it
    ],
)
def test_rotated_slabs_wherever_they_lie(
    heads: int, sizes: tuple[int, int], offset: int, width: int, past: int, stream: Stream
) -> None:
    case = Case(
        (1, 3), (past, 90), "bfloat16", heads, *sizes, rotary_dim=width, rotary_offset=offset, seed=heads
    )
    require(stream, case)
    assert_parity("Hopper: rotary", build(case), stream, kernels=("sm90",))


@pytest.mark.parametrize("heads", [3, 12, 16, 40, 64, 100])
def test_queries_with_room_between_tokens(heads: int, stream: Stream) -> None:
    """A box must not pass from one token's heads to the next's."""
    case = Case((1, 9, 2), (70, 130, 0), heads=heads, seed=heads)
    require(stream, case)
    problem = build(case)
    tokens, width = problem.inputs["query"].shape
    wide = DeviceArray.from_numpy(
        np.concatenate(
            [problem.inputs["query"], np.full_like(problem.inputs["query"][:, :8], np.nan)], axis=1
        ),
        stream,
        stream.device,
    )
    arrays = upload(problem, stream)
    arrays["query"] = DeviceArray(wide.pointer, (tokens, width), wide.strides, wide.dtype, wide.ordinal, wide)
    op = PagedAttention(call_of(problem), bounds_of(problem), device=stream.device, kernel="sm90").prepare()
    output = poisoned((tokens, heads * 512), "bfloat16", stream)
    lse = poisoned((tokens, heads), "float32", stream)
    op.run(**arrays, output=output, lse=lse, stream=stream)
    got = type(reference(problem))(
        output.to_numpy(stream), arrays["key_cache"].to_numpy(stream), lse.to_numpy(stream)
    )
    assert_close("Hopper: padded queries", "sm90", got, reference(problem))


@pytest.mark.parametrize("sizes", [(576, 512), (192, 128)])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("past", [(700, 333), (18_000,)])
def test_the_pipeline_on_its_own(
    sizes: tuple[int, int], block_size: int, past: tuple[int, ...], stream: Stream
) -> None:
    """One-term weights with few keys, and slices long enough to be compared; the sanitizers run it too."""
    case = Case((1,) * len(past), past, "bfloat16", 3, *sizes, block_size=block_size)
    require(stream, case)
    problem = build(case)
    got = run(problem, stream, "sm90", weight_terms=1)
    assert_close_but_for_weights("Hopper: pipeline", "sm90", got, reference(problem), case.heads)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("weight_terms", [1, 2])
@pytest.mark.parametrize("past", [(5, 64), (127, 128), (129, 300), (1_000, 4_001)])
def test_streams_of_tiles_join_whatever_their_maxima(
    past: tuple[int, int], weight_terms: int, odd: bool, stream: Stream
) -> None:
    """With 128 value columns every other tile has a maximum of its own.

    In the first request, where it has two pages, it is far above the other's; in the second every other
    page is missing, so that one of the two has seen nothing.
    """
    pages = range(int(odd), -(-(past[1] + 2) // 64), 2)
    case = Case(
        (1, 2), past, heads=40, head_size=192, v_head_size=128, holes=tuple((1, page) for page in pages)
    )
    require(stream, case)
    problem = build(case)
    cache = problem.inputs["key_cache"].copy()
    for block in problem.inputs["block_table"][0, int(odd) : -(-(past[0] + 1) // 64) : 2]:
        cache[block] = (30 * cache[block].astype(np.float32)).astype(cache.dtype)
    problem = problem.changed(key_cache=cache)
    got = run(problem, stream, "sm90", weight_terms=weight_terms)
    assert_close_but_for_weights("Hopper: streams", "sm90", got, reference(problem), case.heads)


def test_replays_under_stress_repeat_bit_for_bit(stream: Stream, facts: dict[str, Any]) -> None:
    """A hundred thousand replays of twelve batches in random order, each compared with its batch's first.

    Every other batch has pages smaller than a tile, for which two warps load. Slices are of about ten tiles,
    in which one to three asks for leave are compared with the other blocks. Of the last four, with 128 value
    columns, two warpgroups compute the scores in turn.
    """
    rng = np.random.default_rng(11)
    heads = 64
    cases = []
    for seed in range(BATCHES + NARROW_BATCHES):
        spread = 20_000 if BATCHES - 2 <= seed < BATCHES else 2_500
        past = tuple(int(n) for n in rng.integers(spread // 2, spread, 2))
        case = Case((1, 1), past, heads=heads, block_size=16 if seed % 2 else 64, seed=seed)
        cases.append(case if seed < BATCHES else replace(case, head_size=192, v_head_size=128))
    require(stream, cases[0])
    graphs, outputs = [], []
    for case in cases:
        problem = build(case)
        op = PagedAttention(
            call_of(problem), bounds_of(problem), device=stream.device, kernel="sm90"
        ).prepare()
        arrays = upload(problem, stream)
        output = poisoned((2, heads * case.v_head_size), "bfloat16", stream)
        op.run(**arrays, output=output, stream=stream)  # what a graph refers to stays alive with it
        with CapturedGraph(stream) as graph:
            op.run(**arrays, output=output, stream=stream)
        graphs.append(graph)
        outputs.append(output)
    first = []
    for graph, output in zip(graphs, outputs, strict=True):
        graph.replay()
        first.append(output.to_numpy(stream).tobytes())
    facts["stress replays"] = REPLAYS
    for batch in rng.integers(0, len(graphs), REPLAYS):
        graphs[batch].replay()
        if outputs[batch].to_numpy(stream).tobytes() != first[batch]:
            pytest.fail(f"a replay of batch {batch} differs from its first")
    for graph in graphs:
        graph.close()
