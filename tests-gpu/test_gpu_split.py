"""What only the split path promises: a schedule shared by layers, and results that no batch changes."""

import itertools

import numpy as np
import pytest
from paged_cuda import Bounds, CapturedGraph, PagedAttention, Stream
from paged_cuda.split_plan import padded_v_head_size
from parity import (
    assert_close,
    bits,
    bounds_of,
    call_of,
    paths_for,
    poisoned,
    reference,
    run,
    run_with,
    upload,
)
from problems import Case, build

SHAPE = {"heads": 16, "head_size": 192, "v_head_size": 128}


def test_layers_share_a_schedule(stream: Stream) -> None:
    """Two layers of one step: other queries and caches, the same lengths."""
    layers = [build(Case((1, 3, 1), (300, 60, 1000), seed=seed, **SHAPE)) for seed in (1, 2)]
    arrays, output = upload(layers[1], stream), poisoned((5, 16 * 128), "bfloat16", stream)
    for kernel in paths_for(call_of(layers[0]), stream.device):
        op = PagedAttention(call_of(layers[0]), bounds_of(layers[0]), device=stream.device, kernel=kernel)
        op.prepare()
        assert_close("layers share a schedule", kernel, run_with(op, layers[0], stream), reference(layers[0]))
        op.run(**arrays, output=output, reuse_schedule=True, stream=stream)
        want = run(layers[1], stream, kernel)
        np.testing.assert_array_equal(bits(output.to_numpy(stream)), bits(want.output))


LAYERS = 9


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("size", [128, 512])
@pytest.mark.parametrize(("batch", "past"), [(1, 900), (1, 9000), (132, 255), (7, 1000)])
def test_layers_that_feed_each_other(size: int, heads: int, batch: int, past: int, stream: Stream) -> None:
    """A layer's queries are the output of the one before, whose kernels may still run when its own start.

    A step of other lengths comes before each, so that its schedule is not there already; a cache's row is
    another one each time that it is written.
    """
    # With the usual scale the softmax of a query as small as an output is flat, and hides earlier faults.
    shape = {"heads": heads, "head_size": size, "v_head_size": size, "scale": 0.25}
    layers = [build(Case((1,) * batch, (past,) * batch, seed=seed, **shape)) for seed in range(LAYERS)]
    other = upload(build(Case((1,) * batch, (past // 3,) * batch, seed=99, **shape)), stream)
    arrays = [upload(layer, stream) for layer in layers[:3]]
    keys = [upload(layer, stream)["key"] for layer in layers]
    outputs = [poisoned((batch, heads * size), "bfloat16", stream) for _ in arrays]
    for kernel in paths_for(call_of(layers[0]), stream.device):
        op = PagedAttention(call_of(layers[0]), bounds_of(layers[0]), device=stream.device, kernel=kernel)
        op.prepare()

        def forward(op: PagedAttention = op, *, alone: bool = False) -> None:
            op.run(**other, output=outputs[2], stream=stream)
            query = arrays[0]["query"]
            for n, key in enumerate(keys):
                if alone:
                    stream.synchronize()
                inputs = {**arrays[n % 3], "query": query, "key": key}
                op.run(**inputs, output=outputs[n % 3], reuse_schedule=n > 0, stream=stream)
                query = outputs[n % 3]

        def last() -> np.ndarray:
            return bits(outputs[(LAYERS - 1) % 3].to_numpy(stream))

        forward(alone=True)
        want = last()
        assert np.isfinite(outputs[(LAYERS - 1) % 3].to_numpy(stream).astype(np.float32)).all()
        with CapturedGraph(stream) as graph:
            forward()
        for step in (*[forward] * 5, *[lambda graph=graph: graph.replay(stream)] * 5):
            step()
            np.testing.assert_array_equal(last(), want, kernel)


def test_a_fixed_split_gives_the_same_bits_in_any_batch(stream: Stream) -> None:
    """One request alone, and between 63 others of all lengths."""
    rng = np.random.default_rng(7)
    bounds = Bounds(max_batch=64, max_tokens=80, max_context=4096)
    past = [int(n) for n in rng.integers(0, 4000, 64)]
    past[17] = 2500
    crowd = build(Case((1,) * 64, tuple(past), seed=3, **SHAPE))
    start = int(crowd.inputs["cumulative_sequence_length"][17])
    alone = build(Case((1,), (2500,), seed=4, **SHAPE))
    table, block = crowd.inputs["block_table"][17], crowd.inputs["key_cache"].shape[1]
    alone.inputs["query"][:] = crowd.inputs["query"][start : start + 1]
    alone.inputs["key"][:] = crowd.inputs["key"][start : start + 1]
    for column in range(-(-2501 // block)):
        target = alone.inputs["block_table"][0, column]
        alone.inputs["key_cache"][target] = crowd.inputs["key_cache"][table[column]]
    tensor_cores = [kernel for kernel in paths_for(call_of(alone), stream.device) if kernel != "baseline"]
    for kernel, rows in itertools.product(tensor_cores, (256, 1024)):
        both = run(crowd, stream, kernel, bounds=bounds, split_rows=rows)
        one = run(alone, stream, kernel, bounds=bounds, split_rows=rows)
        np.testing.assert_array_equal(bits(both.output[start : start + 1]), bits(one.output))


def test_rounded_weights_stay_within_their_own_error(stream: Stream) -> None:
    """One 16-bit term: the error of rounding each weight to 8 significant bits."""
    problem = build(Case((1, 5, 1), (700, 90, 2000), seed=5, **SHAPE))
    got, want = run(problem, stream, "sm80", weight_terms=1), reference(problem)
    error = got.output.astype(np.float64) - want.output.astype(np.float64)
    assert np.linalg.norm(error) < 2.0**-8 * np.linalg.norm(want.output.astype(np.float64))


@pytest.mark.parametrize("sizes", [(576, 512), (448, 384), (320, 256), (192, 128), (192, 100)])
def test_small_channels_of_a_cut_row_keep_their_digits(sizes: tuple[int, int], stream: Stream) -> None:
    """Partials are integers whose scale columns share: an eighth of the row, in the Hopper kernel a half."""
    case = Case((1,), (5_000,), heads=16, head_size=sizes[0], v_head_size=sizes[1], rotary_dim=0, seed=6)
    problem = build(case)
    columns = np.arange(sizes[0])
    padded = padded_v_head_size(sizes[1])
    size = 64.0 ** -(8 * columns // padded) * 0.5 ** (columns % 4)
    scaled = {
        name: (problem.inputs[name].astype(np.float32) * size).astype(problem.inputs[name].dtype)
        for name in ("key", "key_cache")
    }
    problem = problem.changed(**scaled)
    want = reference(problem).output.astype(np.float64).reshape(16, sizes[1])
    for kernel in paths_for(call_of(problem), stream.device):
        terms = {} if kernel == "baseline" else {"weight_terms": 2}
        got = run(problem, stream, kernel, **terms).output.astype(np.float64).reshape(16, sizes[1])
        shared = padded // (2 if kernel == "sm90" else 8)
        largest = size[columns[: sizes[1]] // shared * shared]
        # Means of 64 keys and more are below one deviation, and an integer is off by half a 32,767th of that.
        # Both outputs are rounded, so they may be a whole unit in the last place apart.
        allowed = largest / 65_534 + 2.0**-7 * np.abs(want) + 2.0**-16 * size[: sizes[1]]
        assert (np.abs(got - want) <= allowed).all(), kernel
