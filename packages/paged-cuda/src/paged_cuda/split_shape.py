"""Tile shapes of the mma.sync kernels, and which of them fits a GPU.

A shape fixes all that `kernels/sm80_latent.cu` or `kernels/sm80_latent_narrow.cu` needs to know at compile
time beside the head sizes. The byte count here is the kernel's own layout; the kernel asserts that the two
agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paged_cuda.signature import ElementType, KernelSignature
from paged_cuda.split_plan import padded_v_head_size

CONSUMER_WARPS = 8
MAX_HEAD_SIZE = 640
ROW_TILES = (16, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class SplitShape:
    """One way to tile the kernel whose warps share every phase.

    Attributes:
        row_tile: Packed query rows of a block.
        kv_tile: KV rows of a stage of the ring.
        stages: Stages of the ring.
        k_split: Warps that share the reduction of one score.
        producer_warps: Warps that only load; 0: the computing warps load.
        blocks_per_multiprocessor: Blocks that run at once on one multiprocessor.
        weight_terms: 16-bit terms of a softmax weight: 1 rounds it as FlashAttention does, 2 keeps the rest.
        registers: Most registers a thread may use; 0: what the threads of a multiprocessor can have.
    """

    row_tile: int
    kv_tile: int
    stages: int
    k_split: int = 4
    producer_warps: int = 4
    blocks_per_multiprocessor: int = 1
    weight_terms: int = 2
    registers: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (CONSUMER_WARPS + self.producer_warps)

    def shared_bytes(self, head_size: int, v_head_size: int) -> int:
        """Return the dynamic shared memory of a block: ring, query, scores, weights, masks and barriers."""
        row = 2 * padded_head_size(head_size, v_head_size)
        columns = self.kv_tile * CONSUMER_WARPS // self.k_split
        ring = self.stages * self.kv_tile * (row + 4)
        scores = self.k_split * self.row_tile * (columns + 8) * 4
        weights = self.weight_terms * self.row_tile * (2 * columns + 16)
        return ring + self.row_tile * (row + 8) + scores + weights + 32 + 8 * (2 * self.stages + 2)

    def signature(self, dtype: ElementType, head_size: int, v_head_size: int) -> KernelSignature:
        """Return the attend kernel of this shape."""
        own = (
            ("K_SPLIT", self.k_split),
            ("PRODUCER_WARPS", self.producer_warps),
            ("CTAS_PER_SM", self.blocks_per_multiprocessor),
            ("REGISTERS", self.registers),
        )
        return _signature("sm80_latent", self, dtype, head_size, v_head_size, own)


@dataclass(frozen=True, slots=True)
class NarrowShape:
    """One way to tile the kernel of narrow rows, whose computing warps take whole KV tiles in turn.

    Attributes:
        stages: Stages of the ring.
        consumer_warps: Warps that compute.
        producer_warps: Warps that only load.
        weight_terms: As above.
        row_tile: Packed query rows of a block.
        kv_tile: KV rows of a stage of the ring.
        blocks_per_multiprocessor: Blocks that run at once on one multiprocessor.
    """

    stages: int
    consumer_warps: int = 4
    producer_warps: int = 4
    weight_terms: int = 2
    row_tile: int = 16
    kv_tile: int = 32
    blocks_per_multiprocessor: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.consumer_warps + self.producer_warps)

    def shared_bytes(self, head_size: int, v_head_size: int) -> int:
        """Return the dynamic shared memory of a block: ring, query, the warps' sums, masks and barriers."""
        row = 2 * padded_head_size(head_size, v_head_size)
        ring = self.stages * self.kv_tile * (row + 4)
        sums = self.consumer_warps * self.row_tile * (4 * (padded_v_head_size(v_head_size) + 8) + 8)
        return ring + self.row_tile * row + sums + 32 + 8 * (2 * self.stages + 2)

    def signature(self, dtype: ElementType, head_size: int, v_head_size: int) -> KernelSignature:
        """Return the attend kernel of this shape."""
        own = (("CONSUMER_WARPS", self.consumer_warps), ("PRODUCER_WARPS", self.producer_warps))
        return _signature("sm80_latent_narrow", self, dtype, head_size, v_head_size, own)


Shape = SplitShape | NarrowShape


def _signature(
    kernel: str,
    shape: Shape,
    dtype: ElementType,
    head_size: int,
    v_head_size: int,
    own: tuple[tuple[str, int], ...],
) -> KernelSignature:
    constants = (
        ("HEAD_SIZE", head_size),
        ("V_HEAD_SIZE", v_head_size),
        ("ROW_TILE", shape.row_tile),
        ("KV_TILE", shape.kv_tile),
        ("STAGES", shape.stages),
        *own,
        ("WEIGHT_TERMS", shape.weight_terms),
        ("SHARED_BYTES", shape.shared_bytes(head_size, v_head_size)),
    )
    return KernelSignature(kernel, dtype, constants)


def padded_head_size(head_size: int, v_head_size: int) -> int:
    """Return the channels of a row in shared memory: whole 128-byte slabs that cover keys and values."""
    return max(-(-head_size // 64) * 64, padded_v_head_size(v_head_size))


# In order of preference for each row tile, by measurement on one H200 (docs/measurements/). The registers of
# the first shape leave room for a block of the combine kernel beside it. Tall tiles leave the loading to the
# computing warps, which then have 255 registers. The last ones are what 99 KB (sm_86, sm_89, sm_120) and
# 163 KB (sm_80) of shared memory admit.
_NARROW = (NarrowShape(12), NarrowShape(8), NarrowShape(4))
_SHAPES: dict[int, tuple[SplitShape, ...]] = {
    16: (
        SplitShape(16, kv_tile=32, stages=4, registers=144),
        SplitShape(16, kv_tile=32, stages=3, registers=144),
        SplitShape(16, kv_tile=16, stages=4, registers=144),
        SplitShape(16, kv_tile=16, stages=3, registers=144),
    ),
    32: (
        SplitShape(32, kv_tile=32, stages=4),
        SplitShape(32, kv_tile=16, stages=5, producer_warps=0),
        SplitShape(32, kv_tile=16, stages=4, producer_warps=0),
    ),
    48: (
        SplitShape(48, kv_tile=16, stages=6, producer_warps=0),
        SplitShape(48, kv_tile=16, stages=4, producer_warps=0),
    ),
    64: (
        SplitShape(64, kv_tile=16, stages=5, producer_warps=0),
        SplitShape(64, kv_tile=16, stages=4, producer_warps=0),
    ),
}


def shapes_for(
    row_tile: int,
    head_size: int,
    v_head_size: int,
    *,
    weight_terms: int = 2,
    shared_bytes: int,
    shared_bytes_multiprocessor: int,
) -> tuple[Shape, ...]:
    """Return the shapes of `row_tile` that fit, best first.

    Args:
        row_tile: One of `ROW_TILES`.
        head_size: Channels of a key.
        v_head_size: Channels of a value.
        weight_terms: 16-bit terms of a softmax weight.
        shared_bytes: Shared memory that one block may use.
        shared_bytes_multiprocessor: Shared memory of a multiprocessor, 1 KB of which each block takes extra.
    """
    shapes: tuple[Shape, ...] = _SHAPES[row_tile]
    if (
        row_tile == 16
        and padded_v_head_size(v_head_size) == 128
        and padded_head_size(head_size, v_head_size) <= 256
    ):
        shapes = (*_NARROW, *shapes)
    return tuple(
        shape
        for shape in (replace(shape, weight_terms=weight_terms) for shape in shapes)
        if (needed := shape.shared_bytes(head_size, v_head_size)) <= shared_bytes
        and shape.blocks_per_multiprocessor * (needed + 1024)
        <= max(shared_bytes_multiprocessor, needed + 1024)
    )
