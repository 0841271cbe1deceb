"""Stores a row behind the committed end of a cache and prints the driver's words, for test_vmm_arena.py."""

from __future__ import annotations

import json

import numpy as np
from paged_cuda import CudaVmmDriver, DeviceArray, DriverError, PagedAttention, Stream
from vmm_support import BLOCK, WIDE, operator

PAGE = BLOCK * WIDE.head_size * 2


def main() -> None:
    stream = Stream(0)
    vmm = CudaVmmDriver(stream.device)
    granule = vmm.granularity()[0]
    address = vmm.reserve_addresses(4 * granule, granule)
    vmm.map_handle(address, granule, vmm.create_handle(granule))
    vmm.set_access(address, granule)
    vmm.fill(address, 0, granule, stream.handle)
    op = operator(WIDE, stream, context=BLOCK, slots=True)
    cache = vmm.array(address, (4 * granule // PAGE, BLOCK, 1, WIDE.head_size), "float16")
    inside, outside = 1, granule // PAGE  # the first page that is not committed
    told = {
        "inside": store(op, cache, inside * BLOCK, stream),
        "first": store(op, cache, outside * BLOCK, stream),
    }
    try:
        stream.synchronize()
        told["after"] = "CUDA_SUCCESS"
    except DriverError as error:
        told["after"] = str(error.got)
    print(json.dumps(told))


def store(op: PagedAttention, cache: DeviceArray, slot: int, stream: Stream) -> str:
    """Run one step whose new row goes to `slot`; the driver's word for how it ended."""

    def upload(values: np.ndarray) -> DeviceArray:
        return DeviceArray.from_numpy(values, stream, stream.device)

    try:
        op.run(
            query=upload(np.ones((1, WIDE.heads * WIDE.head_size), np.float16)),
            key=upload(np.ones((1, WIDE.head_size), np.float16)),
            key_cache=cache,
            cumulative_sequence_length=upload(np.array([0, 1], np.int32)),
            past_seqlens=upload(np.array([0], np.int32)),
            block_table=upload(np.array([[1]], np.int32)),
            slot_mapping=upload(np.array([slot], np.int32)),
            output=DeviceArray.empty((1, WIDE.heads * WIDE.v_head_size), "float16", stream.device),
            stream=stream,
        )
        stream.synchronize()
    except DriverError as error:
        return str(error.got)
    return "CUDA_SUCCESS"


if __name__ == "__main__":
    main()
