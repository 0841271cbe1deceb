"""The tiles that ship for GPUs with less shared memory give the right numbers on this one too."""

from dataclasses import replace

import pytest
from paged_cuda import Device, PagedAttention, Stream
from paged_cuda.launch_plan import PathOptions
from paged_cuda.split_shape import ROW_TILES, shapes_for
from paged_cuda.variants import OPT_IN_BYTES
from parity import assert_close, bounds_of, call_of, reference, run_with
from problems import Case, build

SIZES = ((576, 512), (192, 128), (320, 256))


def smaller(device: Device, shared_bytes: int) -> Device:
    """Return the same GPU, said to have less shared memory."""
    twin = Device(device.driver, device.ordinal)
    properties = replace(
        device.properties, shared_bytes=shared_bytes, shared_bytes_multiprocessor=shared_bytes + 1024
    )
    object.__setattr__(twin, "properties", properties)
    return twin


@pytest.mark.parametrize("architecture", OPT_IN_BYTES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("head_size", "v_head_size"), SIZES)
def test_tiles_of_smaller_gpus(
    architecture: str, dtype: str, head_size: int, v_head_size: int, stream: Stream
) -> None:
    shared_bytes = OPT_IN_BYTES[architecture]
    device = smaller(stream.device, shared_bytes)
    case = Case((1, 5, 1, 0), (700, 90, 64, 3), dtype, heads=16, head_size=head_size, v_head_size=v_head_size)
    problem, seen = build(case), 0
    for row_tile in ROW_TILES if head_size != 320 else (16, 32):
        found = shapes_for(
            row_tile,
            head_size,
            v_head_size,
            weight_terms=PathOptions().weight_terms or 2,
            shared_bytes=shared_bytes,
            shared_bytes_multiprocessor=shared_bytes + 1024,
        )
        if not found:
            continue
        op = PagedAttention(
            call_of(problem), bounds_of(problem), device=device, kernel="sm80", row_tile=row_tile
        )
        op.prepare()
        assert dict(op._step.attend.launches[1].signature.constants)["STAGES"] == found[0].stages
        assert_close(
            "tiles of smaller GPUs", f"row tile {row_tile}", run_with(op, problem, stream), reference(problem)
        )
        seen += 1
    assert seen
