"""What only the device can see is masked or skipped, never a fault; debug kernels count it."""

from typing import Any

import numpy as np
import pytest
from paged_cuda import DeviceArray, PagedAttention, Stream
from parity import (
    assert_close,
    assert_parity,
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
from problems import WILD, Case, Problem, build

BASE = Case((1, 5, 3), (40, 0, 70), heads=4, head_size=192, v_head_size=128, block_size=16)


def with_values(problem: Problem, name: str, changes: dict[Any, int]) -> Problem:
    array = problem.inputs[name].copy()
    for where, value in changes.items():
        array[where] = value
    return problem.changed(**{name: array})


@pytest.mark.parametrize("value", [-1, -2, -(2**31), WILD, 2**31 - 1, "num_blocks"])
def test_ids_outside_the_cache_are_masked_and_not_written(value: int | str, stream: Stream) -> None:
    problem = build(BASE)
    block = problem.inputs["key_cache"].shape[0] if isinstance(value, str) else value
    # The second page of the first sequence is read; the only page of the second is read and written.
    changed = with_values(problem, "block_table", {(0, 1): block, (1, 0): block})
    assert_parity("ids out of range", changed, stream)


def test_slots_outside_the_cache_are_not_written(stream: Stream) -> None:
    problem = build(Case(**{**BASE.__dict__, "slots": True}))
    slots = problem.inputs["key_cache"].shape[0] * 16
    changed = with_values(problem, "slot_mapping", {0: slots, 1: -1, 2: -(2**31), 3: 2**31 - 1, 4: slots + 5})
    assert_parity("slots out of range", changed, stream)


def test_tokens_that_no_sequence_owns_are_zero(stream: Stream) -> None:
    for starts in ([0, 1, 3, 3], [0, 0, 0, 0], [2, 3, 5, 7], [0, 1, 6, 20], [-4, 1, 6, 9], [9, 9, 9, 9]):
        changed = build(BASE).changed(cumulative_sequence_length=np.array(starts, np.int32))
        assert_parity("tokens outside sequences", changed, stream)


def test_a_negative_past_silences_its_sequence(stream: Stream) -> None:
    for past in (-1, -(2**31)):
        assert_parity("negative past", with_values(build(BASE), "past_seqlens", {1: past}), stream)


def test_positions_without_rotary_rows_are_silent(stream: Stream) -> None:
    problem = build(BASE)
    for rows in (1, 2, 71):
        tables = {name: problem.inputs[name][:rows] for name in ("cos_cache", "sin_cache")}
        assert_parity("positions beyond the rotary tables", problem.changed(**tables), stream)


def test_empty_rotary_tables_silence_everything(stream: Stream) -> None:
    problem = build(BASE)
    empty = problem.changed(**{name: problem.inputs[name][:0] for name in ("cos_cache", "sin_cache")})
    for kernel in paths_for(call_of(empty), stream.device):
        got = run(empty, stream, kernel)
        assert not bits(got.output).any()
        np.testing.assert_array_equal(bits(got.cache), bits(problem.inputs["key_cache"]))


def test_positions_beyond_the_table_are_masked(stream: Stream) -> None:
    problem = build(BASE)
    for columns in (0, 1, 3):
        assert_parity(
            "positions beyond the table",
            problem.changed(block_table=problem.inputs["block_table"][:, :columns].copy()),
            stream,
        )


def test_huge_past_lengths_do_not_overflow(stream: Stream) -> None:
    case = Case((1, 1), (3, 15), heads=2, head_size=64, v_head_size=64, rotary_dim=0, block_size=16)
    changed = with_values(build(case), "past_seqlens", {1: 2**31 - 1})
    for kernel in paths_for(call_of(changed), stream.device):
        got = run(changed, stream, kernel)
        assert np.isfinite(got.output.astype(np.float32)).all()


def test_debug_kernels_count_and_name_the_first(stream: Stream) -> None:
    clean = build(Case(**{**BASE.__dict__, "slots": True}))
    for kernel in paths_for(call_of(clean), stream.device, debug=True):
        run(clean, stream, kernel, debug=True)
        assert clean.extra["violations"].count == 0
        slots = clean.inputs["key_cache"].shape[0] * 16
        broken = with_values(clean, "slot_mapping", {4: slots, 2: slots + 3})
        run(broken, stream, kernel, debug=True)
        found = broken.extra["violations"]
        assert (found.count, found.kind, found.token, found.value) == (2, "slot out of range", 2, slots + 3)
        broken = with_values(clean, "past_seqlens", {1: -7})
        run(broken, stream, kernel, debug=True)
        found = broken.extra["violations"]
        assert (found.count, found.kind, found.token, found.value) == (5, "negative past length", 1, -7)


def test_debug_baseline_reports_wild_block_ids(stream: Stream) -> None:
    problem = with_values(build(BASE), "block_table", {(2, 1): WILD})
    run(problem, stream, "baseline", debug=True)
    found = problem.extra["violations"]
    assert (found.kind, found.token, found.value) == ("block id out of range", 6, WILD)


@pytest.mark.parametrize("layout", ["wide rows", "interleaved layers", "row-major pages", "offset view"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_strided_caches(layout: str, dtype: str, stream: Stream) -> None:
    problem = build(Case(**{**BASE.__dict__, "dtype": dtype}))
    cache = problem.inputs["key_cache"]
    blocks, size, _, width = cache.shape
    shape, axes, offset = {
        "wide rows": ((blocks, size, 1, width + 64), (0, 1, 2, 3), 0),
        "interleaved layers": ((blocks, 3, size, width), (0, 2, 1, 3), 1),
        "row-major pages": ((size, blocks, 1, width), (1, 0, 2, 3), 0),
        "offset view": ((blocks + 2, size, 1, width), (0, 1, 2, 3), 2),
    }[layout]
    storage = np.full(shape, np.nan, np.float32).astype(cache.dtype)
    view = (
        storage.transpose(axes)[offset:][:, :, :, :width]
        if layout == "offset view"
        else storage.transpose(axes)
    )
    view = view[:, :, 1:2] if layout == "interleaved layers" else view
    view = view[:, :, :, :width]
    view[...] = cache
    want = reference(problem)
    for kernel in paths_for(call_of(problem), stream.device):
        op = PagedAttention(
            call_of(problem), bounds_of(problem), device=stream.device, kernel=kernel
        ).prepare()
        whole = DeviceArray.from_numpy(storage, stream, stream.device)
        start = view.__array_interface__["data"][0] - storage.__array_interface__["data"][0]
        strided = DeviceArray(
            whole.pointer + start,
            view.shape,
            tuple(s // 2 for s in view.strides),
            whole.dtype,
            whole.ordinal,
            whole,
        )
        arrays = {**upload(problem, stream), "key_cache": strided}
        output = poisoned(want.output.shape, dtype, stream)
        op.run(**arrays, output=output, stream=stream)
        np.testing.assert_allclose(
            output.to_numpy(stream).astype(np.float32),
            want.output.astype(np.float32),
            rtol=2.01 / 128,
            atol=8e-4,
        )
        after = whole.to_numpy(stream)
        expected = storage.copy()
        place = np.lib.stride_tricks.as_strided(
            expected.view(np.uint8)[..., :].reshape(-1)[start:].view(expected.dtype), view.shape, view.strides
        )
        place[...] = want.cache
        np.testing.assert_array_equal(bits(after), bits(expected))


def test_padded_query_rows(stream: Stream) -> None:
    """Query, key and output may be slices of wider tensors."""
    problem = build(BASE)
    want = reference(problem)
    wide = {name: np.concatenate([problem.inputs[name]] * 2, axis=1) for name in ("query", "key")}
    for kernel in paths_for(call_of(problem), stream.device):
        op = PagedAttention(
            call_of(problem), bounds_of(problem), device=stream.device, kernel=kernel
        ).prepare()
        arrays = upload(problem, stream)
        for name, array in wide.items():
            whole = DeviceArray.from_numpy(array, stream, stream.device)
            shape = problem.inputs[name].shape
            arrays[name] = DeviceArray(whole.pointer, shape, whole.strides, whole.dtype, whole.ordinal, whole)
        tokens, width = want.output.shape
        memory = poisoned((tokens, width + 24), "bfloat16", stream)
        output = DeviceArray(
            memory.pointer, (tokens, width), memory.strides, "bfloat16", memory.ordinal, memory
        )
        op.run(**arrays, output=output, stream=stream)
        got = memory.to_numpy(stream)
        assert (bits(got)[:, width:] == 0xFFFF).all()
        np.testing.assert_array_equal(bits(arrays["key_cache"].to_numpy(stream)), bits(want.cache))
        assert np.abs(got[:, :width].astype(np.float32) - want.output.astype(np.float32)).max() < 0.02


def test_runs_are_repeatable_bit_for_bit(stream: Stream) -> None:
    problem = build(Case((1, 9, 33, 1), (900, 100, 0, 64), heads=16, seed=3))
    for kernel in paths_for(call_of(problem), stream.device):
        op = PagedAttention(
            call_of(problem), bounds_of(problem), device=stream.device, kernel=kernel
        ).prepare()
        first = run_with(op, problem, stream)
        for _ in range(5):
            again = run_with(op, problem, stream)
            np.testing.assert_array_equal(bits(again.output), bits(first.output))
            np.testing.assert_array_equal(again.lse.view(np.uint32), first.lse.view(np.uint32))
            np.testing.assert_array_equal(bits(again.cache), bits(first.cache))
        assert_close("repeated runs", kernel, first, reference(problem))
