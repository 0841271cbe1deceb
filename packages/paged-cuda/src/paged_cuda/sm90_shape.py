"""Tile shapes of the Hopper kernel, and what they need.

A shape fixes all that `kernels/sm90_latent.cu` needs to know at compile time beside the head sizes. The byte
count here is the kernel's own layout; the kernel asserts that the two agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_cuda.signature import ElementType, KernelSignature
from paged_cuda.split_plan import padded_v_head_size

ROW_TILE = 64
MAX_SLABS = 9
MAX_V_HEAD_SIZE = 512


@dataclass(frozen=True, slots=True)
class HopperShape:
    """One way to tile the kernel.

    Attributes:
        kv_tile: KV rows of a stage of the ring.
        stages: Stages of the ring.
        held_slabs: 64-channel slabs of the query that stay in registers.
        registers: Registers a thread of the score, output and loading warpgroups. Four warpgroups together
            get at most what 512 threads get at launch, 4 x 128.
    """

    kv_tile: int
    stages: int
    held_slabs: int
    registers: tuple[int, int, int]

    @property
    def row_tile(self) -> int:
        """Packed query rows of a block."""
        return ROW_TILE

    @property
    def threads(self) -> int:
        """Threads of a block: four warpgroups, of which one loads."""
        return 512

    def shared_bytes(self, head_size: int, v_head_size: int) -> int:
        """Return the dynamic shared memory of a block."""
        slabs = slabs_of(head_size, v_head_size)
        ring = self.stages * slabs * self.kv_tile * 128
        kept = (-(-head_size // 64) - self.held_slabs) * ROW_TILE * 128
        weights = 2 * (8192 if self.kv_tile == 32 else 16384)
        kinds = 3 if score_warpgroups(head_size, v_head_size) == 2 else 2  # numbers a row that a buffer has
        factors = kinds * 2 * ROW_TILE * 4 + 2 * 4 * 4
        records, barriers, words = 8 * 64, 8 * (2 * self.stages + 6), 4 * self.stages + 64
        return ring + kept + weights + factors + records + barriers + words

    def signature(self, dtype: ElementType, head_size: int, v_head_size: int) -> KernelSignature:
        """Return the attend kernel of this shape."""
        score, output, loading = self.registers
        constants = (
            ("HEAD_SIZE", head_size),
            ("V_HEAD_SIZE", v_head_size),
            ("KV_TILE", self.kv_tile),
            ("STAGES", self.stages),
            ("HELD_SLABS", self.held_slabs),
            ("SCORE_REGISTERS", score),
            ("OUTPUT_REGISTERS", output),
            ("LOADING_REGISTERS", loading),
            ("SHARED_BYTES", self.shared_bytes(head_size, v_head_size)),
        )
        return KernelSignature("sm90_latent", dtype, constants)


def slabs_of(head_size: int, v_head_size: int) -> int:
    """Return the 64-channel slabs of a row in shared memory: they cover the key and the padded value."""
    return max(-(-head_size // 64), padded_v_head_size(v_head_size) // 64)


def score_warpgroups(head_size: int, v_head_size: int) -> int:
    """Return how many of three warpgroups compute scores, the others outputs.

    Two where the registers of one hold the outputs of both, and those of each of the two the query.
    """
    return 2 if -(-head_size // 64) <= 4 and padded_v_head_size(v_head_size) == 128 else 1


def shape_for(head_size: int, v_head_size: int, shared_bytes: int) -> HopperShape | None:
    """Return the shape for these head sizes, or None where the kernel has none.

    Wide rows leave registers and shared memory for tiles of 32 KV rows; narrower ones take 64, whose fixed
    costs are paid half as often.
    """
    slabs, columns = -(-head_size // 64), padded_v_head_size(v_head_size)
    if slabs > MAX_SLABS or columns > MAX_V_HEAD_SIZE:
        return None
    kv_tile = 64 if slabs <= 6 and columns <= 256 else 32
    registers = {128: (232, 88, 104), 256: (232, 112, 56)}.get(columns, (168, 160, 24))
    step = 1
    if score_warpgroups(head_size, v_head_size) == 2:
        # An even ring: of items of one KV tile the second warpgroup awaits the query alone, every other
        # stage. In an odd one its next stage would last have held keys that it never saw land.
        step, registers = 2, (160, 168, 24)
    for stages in range(8, 2 if kv_tile == 64 else 3, -step):
        shape = HopperShape(kv_tile, stages, min(slabs, 6), registers)
        if shape.shared_bytes(head_size, v_head_size) <= shared_bytes:
            return shape
    return None
