"""What only the split path promises: a schedule shared by layers, and results that no batch changes."""

import itertools

import numpy as np
from paged_cuda import Bounds, PagedAttention, Stream
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
    for kernel in paths_for(call_of(layers[0]), stream.device):
        op = PagedAttention(call_of(layers[0]), bounds_of(layers[0]), device=stream.device, kernel=kernel)
        op.prepare()
        assert_close("layers share a schedule", kernel, run_with(op, layers[0], stream), reference(layers[0]))
        arrays = upload(layers[1], stream)
        output = poisoned((5, 16 * 128), "bfloat16", stream)
        op.run(**arrays, output=output, reuse_schedule=True, stream=stream)
        want = run(layers[1], stream, kernel)
        np.testing.assert_array_equal(bits(output.to_numpy(stream)), bits(want.output))


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
