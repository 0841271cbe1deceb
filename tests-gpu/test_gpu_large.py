"""Offsets beyond 2^31 elements: caches whose only live pages lie at the top, and very many query rows."""

import numpy as np
import pytest
from paged_cuda import Bounds, DeviceArray, PagedAttention, Stream
from parity import Result, assert_close, bits, call_of, paths_for, poisoned, reference, upload
from problems import Case, build

LIMIT = 2**31


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(
    ("head_size", "v_head_size", "block_size"), [(576, 512, 16), (576, 512, 64), (1280, 512, 512)]
)
def test_live_pages_at_the_top(
    head_size: int, v_head_size: int, block_size: int, slots: bool, stream: Stream
) -> None:
    case = Case(
        (1, 3),
        (block_size + 5, 7),
        head_size=head_size,
        v_head_size=v_head_size,
        block_size=block_size,
        heads=4,
        slots=slots,
    )
    small = build(case)
    live = small.inputs["key_cache"].shape[0]
    total = LIMIT // (block_size * head_size) + 8 + live
    shift = total - live
    table = small.inputs["block_table"]
    moved = {"block_table": np.where(table < live, table + shift, table).astype(np.int32)}
    if slots:
        moved["slot_mapping"] = small.inputs["slot_mapping"] + np.int32(shift * block_size)
    want = reference(small)
    for kernel in paths_for(call_of(small), stream.device):
        cache = poisoned((total, block_size, 1, head_size), "bfloat16", stream)
        first = cache.pointer + 2 * shift * block_size * head_size
        top = DeviceArray(
            first, small.inputs["key_cache"].shape, cache.strides, "bfloat16", cache.ordinal, cache
        )
        assert first - cache.pointer > 2 * LIMIT
        source = np.ascontiguousarray(small.inputs["key_cache"])
        with stream.device as device:
            device.driver.copy_to_device(first, source.ctypes.data, source.nbytes, stream.handle)
            device.driver.synchronize(stream.handle)
        arrays = {**upload(small.changed(**moved), stream), "key_cache": cache}
        op = PagedAttention(
            call_of(small), Bounds(2, 4, 4 * block_size), device=stream.device, kernel=kernel
        ).prepare()
        output, lse = (
            poisoned(want.output.shape, "bfloat16", stream),
            poisoned(want.lse.shape, "float32", stream),
        )
        op.run(**arrays, output=output, lse=lse, stream=stream)
        got = Result(output.to_numpy(stream), top.to_numpy(stream), lse.to_numpy(stream))
        assert_close("caches beyond 2^31 elements", kernel, got, want)


def test_query_rows_beyond_the_limit(stream: Stream) -> None:
    """Only the last three of 131,080 rows are live; the others must be zero, not wild."""
    case = Case((1, 2), (40, 5), head_size=192, v_head_size=128, heads=128, block_size=16)
    small = build(case)
    tokens = 131_080
    want = reference(small)
    for kernel in paths_for(call_of(small), stream.device):
        arrays = upload(small, stream)
        for name in ("query", "key"):
            width = arrays[name].shape[1]
            whole = poisoned((tokens, width), "bfloat16", stream)
            source = np.ascontiguousarray(small.inputs[name])
            with stream.device as device:
                target = whole.pointer + 2 * (tokens - 3) * width
                device.driver.copy_to_device(target, source.ctypes.data, source.nbytes, stream.handle)
                device.driver.synchronize(stream.handle)
            arrays[name] = whole
        starts = np.array([tokens - 3, tokens - 2, tokens], np.int32)
        arrays["cumulative_sequence_length"] = DeviceArray.from_numpy(starts, stream, stream.device)
        assert tokens * 128 * 192 > LIMIT
        op = PagedAttention(
            call_of(small), Bounds(2, tokens, 64), device=stream.device, kernel=kernel
        ).prepare()
        output = poisoned((tokens, 128 * 128), "bfloat16", stream)
        lse = poisoned((tokens, 128), "float32", stream)
        op.run(**arrays, output=output, lse=lse, stream=stream)
        rows, last = output.to_numpy(stream), lse.to_numpy(stream)
        assert not bits(rows[:-3]).any()
        assert np.isneginf(last[:-3]).all()
        got = Result(rows[-3:], arrays["key_cache"].to_numpy(stream), last[-3:])
        assert_close("query rows beyond 2^31 elements", kernel, got, want)
