"""What every split-KV path shares: the sizes that bounds fix, the scratch memory, schedule and combine.

The grid is as many slices as the GPU runs blocks, or at most half in small steps (see `Apart`); the device
cuts the step's KV tiles into them from the lengths it finds (`kernels/schedule.cu`). A slice leaves at most
two partials, whatever the batch, so the workspace does not grow with it. With a fixed split the cut points of
a sequence depend on that sequence alone: its output has the same bits in any batch, at the price of one
partial a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from paged_cuda.bounds import INT32_MAX, Bounds
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.launch_plan import LaunchSpec, PathPlan
from paged_cuda.signature import ElementType, KernelSignature, element_type
from paged_cuda.workspace import WorkspaceLayout

if TYPE_CHECKING:
    from paged_schema import Call

MAX_SLICES = 1024  # what the schedule kernel keeps in shared memory
_TILE_COST = 3  # in the schedule's unit: a third of a tile


class Tiles(Protocol):
    """The tile of an attend kernel."""

    @property
    def row_tile(self) -> int:
        """Packed query rows of a block."""
        ...

    @property
    def kv_tile(self) -> int:
        """KV rows of a tile."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """What the schedule takes the work of an attend kernel to be, as it shares it out.

    Attributes:
        min_rows: KV rows of a slice, below which its partial costs more than its rows.
        item_rows: KV rows that take as long as an item's query and output do.
        slow_rows: KV rows up to which an item takes longer for each.
        slow_tile: What a tile of it takes, in thirds of another item's.
    """

    min_rows: int
    item_rows: int
    slow_rows: int = 0
    slow_tile: int = _TILE_COST

    def constants(self, kv_tile: int) -> dict[str, int]:
        """Return the fields of `AttentionParams` for tiles of `kv_tile` rows."""
        return {
            "min_tiles": max(1, self.min_rows // kv_tile),
            "item_cost": _TILE_COST * self.item_rows // kv_tile,
            "slow_tiles": self.slow_rows // kv_tile,
            "slow_cost": self.slow_tile,
        }

    def most(self, tiles: int, kv_tile: int) -> int:
        """Return the largest cost, in thirds of a tile, of an item with up to `tiles` tiles."""
        constants = self.constants(kv_tile)
        slow = self.slow_tile * min(tiles, constants["slow_tiles"])
        return constants["item_cost"] + max(slow, _TILE_COST * tiles)


@dataclass(frozen=True, slots=True)
class Partials:
    """How a path's attend kernel leaves its partials, and the combine kernel that reads them.

    Attributes:
        combine: The kernel.
        paired: Whether rows lie two by two as wgmma's accumulators do; else one after the other.
        threads: Of a block of the combine kernel, which share a line where few lines lie in many parts.
        blocks: Of the combine kernel a multiprocessor; the next number where a warp for each line takes more.
            Beside the mma.sync kernel of 16 rows one fits and waits there, beside wgmma none.
        shared_bytes: Dynamic shared memory of a block, into which parts are fetched.
        halves: Whether half a warp may take a line of 128 columns, where whole warps would take more blocks.
    """

    combine: str = "combine"
    paired: bool = False
    threads: int = 128
    blocks: tuple[int, ...] = (1, 2)
    shared_bytes: int = 0
    halves: bool = False

    @property
    def fact_bytes(self) -> int:
        """Return the bytes kept of a row beside its values: log-sum-exp and scale of each half or eighth."""
        return 16 if self.paired else 64

    def lines(self, rows: int) -> int:
        """Return the lines of an item of `rows` rows; the combine kernel's workers take them one by one."""
        return -(-rows // 16) * 8 if self.paired else rows

    def workers(self, v_head_size: int, *, apart: bool) -> tuple[tuple[int, int], ...]:
        """Return how a line may be shared, by falling threads: parts of its columns, threads for each.

        Args:
            v_head_size: Columns of a row.
            apart: Whether combine has places of its own (see `Apart`), when a block may take a whole line.
        """
        groups = padded_v_head_size(v_head_size) // 128
        whole = [(parts, self.threads) for parts in ((8, 4, 2, 1) if apart else (8, 4, 2))]
        warps = [(parts, 32) for parts in (4, 2, 1) if groups % parts == 0]
        halves = [(1, 16)] if groups == 1 and self.halves else []
        return (*whole, *warps, *halves)

    def signature(
        self, dtype: ElementType, v_head_size: int, *, row_tile: int, column_parts: int, worker: int
    ) -> KernelSignature:
        """Return the combine kernel that shares out its rows so (see `CombineShape`)."""
        constants = (
            ("V_HEAD_SIZE", v_head_size),
            ("ROW_TILE", row_tile),
            ("COLUMN_PARTS", column_parts),
            ("WORKER", worker),
        )
        own = (("SHARED_BYTES", self.shared_bytes),) if self.shared_bytes else ()
        return KernelSignature(self.combine, dtype, (*constants, *own))


ROW_PARTIALS = Partials(halves=True)
TALL_PARTIALS = Partials(blocks=(4,))
PAIRED_PARTIALS = Partials("combine_paired", paired=True, threads=256, blocks=(2,), shared_bytes=77_824)


def query_rows(call: Call, bounds: Bounds) -> int:
    """Return the packed query rows that a request of the largest batch brings on average."""
    return call.num_heads * max(1, bounds.max_tokens // bounds.max_batch)


def padded_v_head_size(v_head_size: int) -> int:
    """Return the output columns that the kernels compute: whole groups of 128."""
    return -(-v_head_size // 128) * 128


@dataclass(frozen=True, slots=True)
class Apart:
    """Small steps in which attend leaves half of its places or more to combine, where no blocks share one.

    Combine's blocks can then wait in their places until attend is done, and the next attend's until combine
    is, in place of starting only then.

    Attributes:
        most_rows: KV rows that a slice may have, times the row tiles that read them.
        min_rows: KV rows that a slice has at least.
    """

    most_rows: int
    min_rows: int

    def slices(self, rows: int, blocks: int, row_tiles: int) -> int:
        """Return the slices of a step whose items have at most `rows` KV rows, or 0 if it is too large."""
        most = min(blocks // 2 // row_tiles, MAX_SLICES)
        if most * self.most_rows < rows * row_tiles:
            return 0
        return min(most, -(-rows // self.min_rows))


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """Everything that the bounds fix.

    Attributes:
        row_tiles: Row tiles that share a slice: several when a token has more heads than a tile has rows.
        item_rows: Packed rows of an item.
        slices: Slices of a step.
        max_items: Items of the largest step.
        chunk: KV tiles of a part under a fixed split, else 0.
        slots: Partials that the workspace holds, each `row_tiles` tall.
        cut_items: The most items that can be cut, or are taken at once under a fixed split.
        combine_entries: Ends of the list of cut items that the combine kernel may look at; more than its
            workers reach over at once.
        left: Places of blocks that are left to combine; 0: none.
    """

    row_tiles: int
    item_rows: int
    slices: int
    max_items: int
    chunk: int
    slots: int
    cut_items: int
    combine_entries: int
    left: int = 0

    @classmethod
    def of(
        cls,
        heads: int,
        bounds: Bounds,
        tiles: Tiles,
        *,
        blocks: int,
        split_rows: int,
        apart: Apart | None = None,
    ) -> SplitSizes:
        """Derive the sizes for `heads` query heads on a GPU that runs `blocks` blocks at once."""
        tall = heads >= tiles.row_tile
        row_tiles = -(-heads // tiles.row_tile) if tall else 1
        item_rows = heads if tall else tiles.row_tile
        if tall:
            max_items = bounds.max_tokens
        else:  # tokens of a request share an item
            max_items = -(-bounds.max_tokens * heads // tiles.row_tile) + bounds.max_batch
        chunk = split_rows // tiles.kv_tile
        slices = left = 0
        if apart and not chunk:
            rows = min(max_items, bounds.max_tokens) * bounds.max_context
            slices = apart.slices(rows, blocks, row_tiles)
        if slices:
            left = blocks - slices * row_tiles
        else:
            slices = max(1, min(blocks // row_tiles, MAX_SLICES))
        slots = max_items * (bounds.max_context // split_rows + 2) if chunk else 2 * slices
        cut = min(max_items, 2048 if chunk else slices)
        return cls(row_tiles, item_rows, slices, max_items, chunk, slots, cut, cut + 2, left)


@dataclass(frozen=True, slots=True)
class CombineShape:
    """How the combine kernel shares out its rows.

    Attributes:
        column_parts: Workers that share an output row.
        worker: Threads of a worker: a warp, half of one, or a block that shares the parts of a row.
        grid: Blocks.
    """

    column_parts: int
    worker: int
    grid: int

    @classmethod
    def of(
        cls, lines: int, v_head_size: int, multiprocessors: int, partials: Partials, *, apart: bool = False
    ) -> CombineShape:
        """Cut the columns until all blocks are busy, for the `lines` (rows, or pairs) that may be cut.

        Few lines lie in many parts each, which a whole block takes at once; of many lines each has few parts,
        and a warp takes it, or half of one. Where combine is `apart` (see `Apart`) its blocks should all find
        a place at once.
        """
        workers = partials.workers(v_head_size, apart=apart)
        for blocks in partials.blocks:
            threads = blocks * multiprocessors * partials.threads
            for column_parts, worker in workers:
                if (needed := lines * column_parts * worker) <= threads:
                    return cls(column_parts, worker, -(-needed // partials.threads))
        return cls(1, 32, partials.blocks[-1] * multiprocessors)


def split_plan(
    call: Call,
    bounds: Bounds,
    tiles: Tiles,
    attend: Callable[[SplitSizes], LaunchSpec],
    *,
    multiprocessors: int,
    blocks_per_multiprocessor: int,
    split_rows: int,
    costs: Costs,
    partials: Partials,
    query_channels: tuple[int, int],
    apart: Apart | None = None,
    own_regions: Mapping[str, int] | None = None,
    description: str,
) -> PathPlan:
    """Return schedule, attend and combine around one attend kernel.

    Args:
        call: The checked node.
        bounds: The largest batch.
        tiles: The kernel's tile.
        attend: Its launch, for the sizes found.
        multiprocessors: Of the GPU.
        blocks_per_multiprocessor: Blocks of the attend kernel that run at once on one.
        split_rows: KV rows of a part under a fixed split, else 0.
        costs: What the kernel's work costs.
        partials: How it leaves its partials.
        query_channels: First and number of the channels of a query head that append writes, rotated, for the
            kernel; (0, 0): none.
        apart: In which steps attend leaves half of the multiprocessors to combine; None: in none.
        own_regions: Bytes of further regions of the workspace, by name, that the attend kernel needs.
        description: The tiles, in words.

    Raises:
        ArgumentMismatch: The split is no multiple of a tile, or the bounds hold more rows than an int32
            counts.
    """
    if split_rows % tiles.kv_tile:
        raise ArgumentMismatch("split_rows", "split_rows", split_rows, f"a multiple of {tiles.kv_tile}, or 0")
    rows = bounds.max_tokens * call.num_heads
    if rows > INT32_MAX - 64:
        raise ArgumentMismatch("bounds", "max_tokens * num_heads", rows, f"at most {INT32_MAX - 64}")
    blocks = multiprocessors * blocks_per_multiprocessor
    sizes = SplitSizes.of(call.num_heads, bounds, tiles, blocks=blocks, split_rows=split_rows, apart=apart)
    if apart and sizes.left:
        costs = replace(costs, min_rows=apart.min_rows)
    tiles_at_most = bounds.max_context // tiles.kv_tile + 2
    most = sizes.max_items * (tiles_at_most if sizes.chunk else costs.most(tiles_at_most, tiles.kv_tile))
    if most > INT32_MAX:
        wanted = f"at most {INT32_MAX}: fewer tokens or a shorter context"
        raise ArgumentMismatch("bounds", "cost of a step's KV tiles", most, wanted)
    threads = 256 if max(bounds.max_batch, sizes.max_items, sizes.slices + 1) <= 256 else 1024
    dtype, v_head_size = element_type(call), call.v_head_size or 0
    schedule = LaunchSpec(
        KernelSignature("schedule", dtype, (("THREADS", threads),)),
        (1, 1, 1),
        (threads, 1, 1),
        programmatic=True,
        schedule=True,
    )
    lines = sizes.cut_items * partials.lines(sizes.item_rows)
    places = sizes.left // blocks_per_multiprocessor if sizes.left else multiprocessors
    merge = CombineShape.of(lines, v_head_size, places, partials, apart=sizes.left > 0)
    combine = LaunchSpec(
        partials.signature(
            dtype,
            v_head_size,
            row_tile=tiles.row_tile,
            column_parts=merge.column_parts,
            worker=merge.worker,
        ),
        (merge.grid, 1, 1),
        (partials.threads, 1, 1),
        partials.shared_bytes,
        programmatic=True,
    )
    constants = {
        "slices": sizes.slices,
        "row_tiles": sizes.row_tiles,
        "row_tile": tiles.row_tile,
        "kv_tile_shift": tiles.kv_tile.bit_length() - 1,
        **costs.constants(tiles.kv_tile),
        "chunk": sizes.chunk,
        "max_items": sizes.max_items,
        "max_parts": sizes.slots if sizes.chunk else 0,
        "combine_entries": sizes.combine_entries,
        "query_first": query_channels[0],
        "query_width": query_channels[1],
    }
    workspace = _workspace(call, bounds, tiles, sizes, partials, query_channels[1], own_regions or {})
    if sizes.left:
        description += (
            f", {sizes.slices * sizes.row_tiles} of {blocks} places of blocks, the others for combine"
        )
    return PathPlan((schedule, attend(sizes), combine), workspace, constants, description)


def _workspace(
    call: Call,
    bounds: Bounds,
    tiles: Tiles,
    sizes: SplitSizes,
    partials: Partials,
    query_width: int,
    own_regions: Mapping[str, int],
) -> WorkspaceLayout:
    rows = sizes.slots * sizes.row_tiles * tiles.row_tile
    lists = max(sizes.slices, sizes.max_items if sizes.chunk else 0)
    return WorkspaceLayout.of(
        query_rotary=bounds.max_tokens * call.num_heads * query_width * 2,
        items=32 * sizes.max_items,
        starts=64 * (sizes.slices + 1),
        splits=32 * (lists + bounds.max_batch + 2 + sizes.combine_entries),
        item_begin=4 * sizes.max_items,
        request_begin=4 * bounds.max_batch,
        partial_output=2 * rows * padded_v_head_size(call.v_head_size or 0),
        partial_facts=partials.fact_bytes * rows,
        **own_regions,
    )
