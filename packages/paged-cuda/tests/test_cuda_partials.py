"""What kernels that leave partials, kernels that merge them and the host must agree on.

A check is appended to the kernel's own text, so it sees the kernel's own constants.
"""

from __future__ import annotations

import re

import pytest
from paged_cuda import CompileError
from paged_cuda._nvrtc import compile_to_cubin
from paged_cuda.compiler import compile_kernels
from paged_cuda.signature import KernelSignature
from paged_cuda.sources import kernel_source
from paged_cuda.split_plan import PAIRED_PARTIALS, ROW_PARTIALS, CombineShape, Partials
from paged_cuda.split_shape import SplitShape
from paged_cuda.variants import VARIANTS

MULTIPROCESSOR_SHARED_BYTES = 233_472  # of an H100 or H200; each block takes 1,024 more than it asks for


def assert_kernel_holds(signature: KernelSignature, check: str) -> None:
    macros = [f"-D{name}={value}" for name, value in signature.macros.items()]
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "-default-device", *macros]
    source = f'{kernel_source(signature.source)}\nstatic_assert({check}, "checked by a test");\n'
    assert compile_to_cubin(source, signature.source, options).cubin


def merging(partials: Partials, columns: int, column_parts: int, worker: int) -> KernelSignature:
    return partials.signature("bfloat16", columns, row_tile=64, column_parts=column_parts, worker=worker)


def test_a_check_that_does_not_hold_is_noticed() -> None:
    with pytest.raises(CompileError, match="checked by a test"):
        assert_kernel_holds(merging(PAIRED_PARTIALS, 128, 1, 32), "kColumns == 0")


@pytest.mark.parametrize(("header", "partials"), [("row", ROW_PARTIALS), ("paired", PAIRED_PARTIALS)])
def test_the_facts_of_rows_lie_as_far_apart_as_the_host_reserves(header: str, partials: Partials) -> None:
    source = kernel_source(f"layout/{header}_partial.cuh")
    assert re.search(r"p\.partial_facts \+ (?:\(u64\))?at \* kFacts\b", source)
    facts = re.search(r"\bkFacts = (\d+)", source)
    assert facts is not None
    assert 4 * int(facts[1]) == partials.fact_bytes


@pytest.mark.parametrize("columns", [128, 384, 512])
def test_paired_rows_are_merged_as_far_apart_as_they_are_left(columns: int) -> None:
    """Sixteen rows lie together; between tiles a row counts as its values, and its facts as reserved."""
    signature = merging(PAIRED_PARTIALS, columns, 1, 32)
    assert_kernel_holds(signature, "16 * kRowBytes == 4 * 8 * kVPadded")
    assert_kernel_holds(signature, f"kFactBytes == {PAIRED_PARTIALS.fact_bytes}")


@pytest.mark.parametrize(
    ("columns", "column_parts", "worker"),
    [
        (512, 8, 256),
        (512, 4, 256),
        (512, 2, 256),
        (512, 1, 256),
        (512, 4, 32),
        (512, 1, 32),
        (384, 8, 256),
        (128, 8, 256),
    ],
)
def test_what_a_worker_fetches_fits_the_shared_memory(columns: int, column_parts: int, worker: int) -> None:
    """The words of each part, log-sum-exp and scale of two rows and halves, and a factor for each."""
    assert_kernel_holds(
        merging(PAIRED_PARTIALS, columns, column_parts, worker),
        "kWorkers * kParts * (kWords * 16 + 2 * 16 + 2 * 8) <= SHARED_BYTES",
    )


@pytest.mark.parametrize("column_parts", [1, 2, 4, 8])
def test_two_merging_blocks_fit_a_multiprocessor(column_parts: int) -> None:
    """As many as the grid counts on, with the static shared memory beside what is asked for."""
    signature = merging(PAIRED_PARTIALS, 512, column_parts, PAIRED_PARTIALS.threads)
    (kernel,) = compile_kernels([(signature, "sm_90a")])
    block = kernel.resources.shared_bytes + PAIRED_PARTIALS.shared_bytes + 1024
    assert max(PAIRED_PARTIALS.blocks) * block <= MULTIPROCESSOR_SHARED_BYTES


def test_a_warp_of_the_wide_kernel_has_an_eighth_of_the_columns() -> None:
    """It leaves one scale, at the place of its number."""
    shape = SplitShape(16, kv_tile=32, stages=4, registers=144)
    assert_kernel_holds(shape.signature("bfloat16", 576, 512), "kWarpColumns == kScaleColumns")


@pytest.mark.parametrize("columns", [8, 256, 384, 512, 640])
def test_rows_of_every_width_are_merged_by_every_worker(columns: int) -> None:
    """Widths that ship with few workers, or not at all, as well: whatever `CombineShape` may choose."""
    shapes = {CombineShape.of(lines, columns, 132, ROW_PARTIALS) for lines in (2**n for n in range(16))}
    workers = {(shape.column_parts, shape.worker) for shape in shapes}
    assert (1, 32) in workers
    assert (8, ROW_PARTIALS.threads) in workers
    assert ((1, 16) in workers) == (columns <= 128)
    signatures = [
        ROW_PARTIALS.signature("bfloat16", columns, row_tile=16, column_parts=parts, worker=worker)
        for parts, worker in sorted(workers)
    ]
    for kernel in compile_kernels([(signature, "sm_80") for signature in signatures]):
        assert kernel.resources.local_bytes == 0
        assert kernel.resources.registers <= (64 if columns <= 128 else 80)


def test_no_listed_hopper_kernel_may_use_local_memory() -> None:
    listed = [variant for variant in VARIANTS if variant.signature.kernel == "sm90_latent"]
    assert listed
    assert {variant.max_local_bytes for variant in listed} == {0}
