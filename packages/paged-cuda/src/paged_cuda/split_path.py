"""Split-KV attention on mma.sync tensor cores, sm_80 and later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_cuda._driver import DeviceProperties
from paged_cuda.bounds import Bounds
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.launch_plan import LaunchSpec, PathOptions, PathPlan
from paged_cuda.signature import element_type
from paged_cuda.small_steps import small_pairs
from paged_cuda.split_plan import ROW_PARTIALS, TALL_PARTIALS, Costs, SplitSizes, query_rows, split_plan
from paged_cuda.split_shape import MAX_HEAD_SIZE, ROW_TILES, Shape, shapes_for

if TYPE_CHECKING:
    from paged_schema import Call


def _row_tile(call: Call, bounds: Bounds, properties: DeviceProperties, options: PathOptions) -> int:
    """Choose the row tile from what is frozen: heads, and whether the bounds speak of prefill or little work.

    On an H200 32 rows beat 48 and 64 wherever both were measured, and 16 rows win where a token has no more
    heads than that and decodes (docs/measurements/), or in small steps; those where kernels overlap, from
    compute capability 9.0 on.
    """
    rows = query_rows(call, bounds)
    small = properties.capability >= (9, 0) and small_pairs(call, bounds, options)
    return 16 if rows <= 16 or small else 32


_COSTS = Costs(min_rows=64, item_rows=64)


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

    def yields(self, call: Call, bounds: Bounds, options: PathOptions) -> None:
        """Return None: nothing is measured to be faster than this among the paths after it."""

    def plan(
        self, call: Call, bounds: Bounds, properties: DeviceProperties, options: PathOptions
    ) -> PathPlan:
        """Return schedule, attend and combine.

        Raises:
            ArgumentMismatch: The options name a row tile or a split that this path does not have, or the
                bounds hold more rows than an int32 counts.
        """
        shape = self._shape(call, bounds, properties, options)
        head_size, v_head_size = call.head_size or 0, call.v_head_size or 0

        def attend(sizes: SplitSizes) -> LaunchSpec:
            return LaunchSpec(
                shape.signature(element_type(call), head_size, v_head_size),
                (sizes.slices * sizes.row_tiles, 1, 1),
                (shape.threads, 1, 1),
                shape.shared_bytes(head_size, v_head_size),
                programmatic=True,
            )

        return split_plan(
            call,
            bounds,
            shape,
            attend,
            multiprocessors=properties.multiprocessors,
            blocks_per_multiprocessor=shape.blocks_per_multiprocessor,
            split_rows=options.split_rows,
            costs=_COSTS,
            partials=ROW_PARTIALS if shape.row_tile == 16 else TALL_PARTIALS,
            query_channels=(call.rotary_offset, call.rotary_dim or 0) if call.rotary else (0, 0),
            description=_describe(shape),
        )

    def _shapes(
        self, call: Call, row_tile: int, properties: DeviceProperties, options: PathOptions
    ) -> tuple[Shape, ...]:
        return shapes_for(
            row_tile,
            call.head_size or 0,
            call.v_head_size or 0,
            weight_terms=options.weight_terms or 2,
            shared_bytes=properties.shared_bytes,
            shared_bytes_multiprocessor=properties.shared_bytes_multiprocessor,
        )

    def _shape(self, call: Call, bounds: Bounds, properties: DeviceProperties, options: PathOptions) -> Shape:
        if options.row_tile is not None and options.row_tile not in ROW_TILES:
            raise ArgumentMismatch("row_tile", "row_tile", options.row_tile, f"one of {ROW_TILES}")
        wanted = options.row_tile or _row_tile(call, bounds, properties, options)
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


def _describe(shape: Shape) -> str:
    return (
        f"row tile {shape.row_tile}, KV tile {shape.kv_tile}, {shape.stages} stages, "
        f"{shape.producer_warps} loading warps, {shape.blocks_per_multiprocessor} block(s) a multiprocessor"
    )
