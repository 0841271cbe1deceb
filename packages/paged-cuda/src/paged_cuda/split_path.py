"""Split-KV attention on tensor cores: schedule, attend and combine, all sized by bounds.

The grid is as many slices as the GPU runs blocks; the device cuts the step's KV tiles into them from the
lengths it finds (`kernels/schedule.cu`). A slice leaves at most two partials, whatever the batch, so the
workspace does not grow with it. With a fixed split the cut points of a sequence depend on that sequence
alone: its output has the same bits in any batch, at the price of one partial a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_cuda._driver import DeviceProperties
from paged_cuda.bounds import INT32_MAX, Bounds
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.launch_plan import LaunchSpec, PathOptions, PathPlan
from paged_cuda.signature import KernelSignature, combine_signature, element_type
from paged_cuda.split_shape import MAX_HEAD_SIZE, ROW_TILES, SplitShape, padded_v_head_size, shapes_for
from paged_cuda.workspace import WorkspaceLayout

if TYPE_CHECKING:
    from paged_schema import Call

MAX_SLICES = 1024  # what the schedule kernel keeps in shared memory
_MIN_ROWS = 64  # KV rows of a slice: below, the partial costs more than the rows
_COMBINE_TASKS = 528  # tasks that keep the GPU busy; columns are cut until there are about that many
_COMBINE_BLOCKS = 8  # blocks of the combine kernel a multiprocessor


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
        combine_entries: Ends of the list of cut items that the combine kernel may look at; at least as many
            as its blocks reach over at once.
        column_parts: Blocks that share an output row in the combine kernel.
    """

    row_tiles: int
    item_rows: int
    slices: int
    max_items: int
    chunk: int
    slots: int
    combine_entries: int
    column_parts: int

    @classmethod
    def of(cls, heads: int, bounds: Bounds, shape: SplitShape, *, blocks: int, split_rows: int) -> SplitSizes:
        """Derive the sizes for `heads` query heads on a GPU that runs `blocks` blocks at once."""
        tall = heads >= shape.row_tile
        row_tiles = -(-heads // shape.row_tile) if tall else 1
        item_rows = heads if tall else shape.row_tile
        slices = max(1, min(blocks // row_tiles, MAX_SLICES))
        if tall:
            max_items = bounds.max_tokens
        else:
            max_items = -(-bounds.max_tokens * heads // shape.row_tile) + bounds.max_batch
        chunk = split_rows // shape.kv_tile
        slots = max_items * (bounds.max_context // split_rows + 2) if chunk else 2 * slices
        entries = min(max_items, 2048 if chunk else slices) + 1
        parts = next((n for n in (8, 4, 2) if entries * item_rows * n <= _COMBINE_TASKS), 1)
        return cls(row_tiles, item_rows, slices, max_items, chunk, slots, entries, parts)


def _row_tile(call: Call, bounds: Bounds) -> int:
    """Choose the row tile from what is frozen: heads, and whether the bounds speak of prefill.

    On an H200 32 rows beat 48 and 64 wherever both were measured, and 16 rows win where a token has no more
    heads than that and decodes (docs/measurements/).
    """
    rows = call.num_heads * max(1, bounds.max_tokens // bounds.max_batch)
    return 16 if rows <= 16 else 32


@dataclass(frozen=True, slots=True)
class SplitPath:
    """mma.sync tensor cores, sm_80 and later, head sizes up to 640."""

    name: str = "sm80"

    def refuses(self, call: Call, properties: DeviceProperties, options: PathOptions) -> str | None:
        """Return why not: a debug operator, wide heads, or too little shared memory."""
        if options.debug:
            return "debug kernels are the baseline's"
        if (call.head_size or 0) > MAX_HEAD_SIZE:
            return f"head_size {call.head_size} is above {MAX_HEAD_SIZE}"
        if not self._shapes(call, 16, properties, options):
            return f"no tile fits {properties.shared_bytes} bytes of shared memory"
        return None

    def plan(
        self, call: Call, bounds: Bounds, properties: DeviceProperties, options: PathOptions
    ) -> PathPlan:
        """Return schedule, attend and combine.

        Raises:
            ArgumentMismatch: The options name a row tile or a split that this path does not have, or the
                bounds hold more rows than an int32 counts.
        """
        shape = self._shape(call, bounds, properties, options)
        if options.split_rows % shape.kv_tile:
            raise ArgumentMismatch(
                "split_rows", "split_rows", options.split_rows, f"a multiple of {shape.kv_tile}, or 0"
            )
        if bounds.max_tokens * call.num_heads > INT32_MAX - 64:
            raise ArgumentMismatch(
                "bounds",
                "max_tokens * num_heads",
                bounds.max_tokens * call.num_heads,
                f"at most {INT32_MAX - 64}",
            )
        blocks = properties.multiprocessors * shape.blocks_per_multiprocessor
        sizes = SplitSizes.of(call.num_heads, bounds, shape, blocks=blocks, split_rows=options.split_rows)
        threads = 256 if max(bounds.max_batch, sizes.max_items, sizes.slices + 1) <= 256 else 1024
        tasks = sizes.combine_entries * sizes.item_rows * sizes.column_parts
        dtype, head_size, v_head_size = element_type(call), call.head_size or 0, call.v_head_size or 0
        launches = (
            LaunchSpec(
                KernelSignature("schedule", dtype, (("THREADS", threads),)),
                (1, 1, 1),
                (threads, 1, 1),
                programmatic=True,
                schedule=True,
            ),
            LaunchSpec(
                shape.signature(dtype, head_size, v_head_size),
                (sizes.slices * sizes.row_tiles, 1, 1),
                (shape.threads, 1, 1),
                shape.shared_bytes(head_size, v_head_size),
                programmatic=True,
            ),
            LaunchSpec(
                combine_signature(
                    dtype, v_head_size, row_tile=shape.row_tile, column_parts=sizes.column_parts
                ),
                (min(tasks, _COMBINE_BLOCKS * properties.multiprocessors), 1, 1),
                (_combine_threads(v_head_size, sizes.column_parts), 1, 1),
                programmatic=True,
            ),
        )
        constants = {
            "slices": sizes.slices,
            "row_tiles": sizes.row_tiles,
            "row_tile": shape.row_tile,
            "kv_tile_shift": shape.kv_tile.bit_length() - 1,
            "min_tiles": max(1, _MIN_ROWS // shape.kv_tile),
            "chunk": sizes.chunk,
            "max_items": sizes.max_items,
            "max_parts": sizes.slots if sizes.chunk else 0,
            "combine_entries": sizes.combine_entries,
        }
        return PathPlan(launches, self._workspace(call, bounds, shape, sizes), constants, _describe(shape))

    def _workspace(self, call: Call, bounds: Bounds, shape: SplitShape, sizes: SplitSizes) -> WorkspaceLayout:
        rows = sizes.slots * sizes.row_tiles * shape.row_tile
        lists = max(sizes.slices, sizes.max_items if sizes.chunk else 0)
        rotary = bounds.max_tokens * call.num_heads * (call.rotary_dim or 0) * 2 if call.rotary else 0
        return WorkspaceLayout.of(
            query_rotary=rotary,
            items=32 * sizes.max_items,
            starts=64 * (sizes.slices + 1),
            splits=32 * (lists + bounds.max_batch + 2 + sizes.combine_entries),
            item_begin=4 * sizes.max_items,
            request_begin=4 * bounds.max_batch,
            partial_output=4 * rows * padded_v_head_size(call.v_head_size or 0),
            partial_lse=4 * rows,
        )

    def _shapes(
        self, call: Call, row_tile: int, properties: DeviceProperties, options: PathOptions
    ) -> tuple[SplitShape, ...]:
        return shapes_for(
            row_tile,
            call.head_size or 0,
            call.v_head_size or 0,
            weight_terms=options.weight_terms,
            shared_bytes=properties.shared_bytes,
            shared_bytes_multiprocessor=properties.shared_bytes_multiprocessor,
        )

    def _shape(
        self, call: Call, bounds: Bounds, properties: DeviceProperties, options: PathOptions
    ) -> SplitShape:
        if options.row_tile is not None and options.row_tile not in ROW_TILES:
            raise ArgumentMismatch("row_tile", "row_tile", options.row_tile, f"one of {ROW_TILES}")
        wanted = options.row_tile or _row_tile(call, bounds)
        found = self._shapes(call, wanted, properties, options)
        if not found and options.row_tile is None:
            found = self._shapes(call, 16, properties, options)
        if not found:
            raise ArgumentMismatch(
                "row_tile",
                "row_tile",
                wanted,
                f"a tile that fits {properties.shared_bytes} bytes of shared memory",
            )
        return found[0]


def _combine_threads(v_head_size: int, column_parts: int) -> int:
    lanes = padded_v_head_size(v_head_size) // column_parts // 4
    return 256 if column_parts >= 4 else max(128, lanes)


def _describe(shape: SplitShape) -> str:
    return (
        f"row tile {shape.row_tile}, KV tile {shape.kv_tile}, {shape.stages} stages, "
        f"{shape.producer_warps} loading warps, {shape.blocks_per_multiprocessor} block(s) a multiprocessor"
    )
