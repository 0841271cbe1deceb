"""Split-KV attention on wgmma and the copy engine: Hopper only, tiles of 64 packed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paged_cuda._driver import DeviceProperties
from paged_cuda.bounds import INT32_MAX, Bounds
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.launch_plan import LaunchSpec, PathOptions, PathPlan
from paged_cuda.signature import element_type
from paged_cuda.sm90_shape import (
    MAX_SLABS,
    MAX_V_HEAD_SIZE,
    ROW_TILE,
    HopperShape,
    score_warpgroups,
    shape_for,
    slabs_of,
)
from paged_cuda.small_steps import small_pairs
from paged_cuda.split_plan import (
    PAIRED_PARTIALS,
    Apart,
    Costs,
    SplitSizes,
    padded_v_head_size,
    query_rows,
    split_plan,
)
from paged_cuda.tensor_maps import SLAB_CHANNELS, MapPlan

if TYPE_CHECKING:
    from paged_schema import Call

# Of an item, up to which the default adds the second term of the weights: whole tiles of 32. With tiles of 64
# it is 960.
TWO_TERM_KEYS = 992
# By the rows of a KV tile and the warpgroups that compute scores; measured in prefills
# (docs/measurements/h200-sm90-log.md, runs 8, 11, 12 and 15).
_COSTS = {
    (32, 1): Costs(min_rows=128, item_rows=128, slow_tile=6),
    (64, 1): Costs(min_rows=128, item_rows=192, slow_tile=5),
    (64, 2): Costs(min_rows=128, item_rows=192, slow_tile=4),
}
# Measured in small steps with one row tile and with two (docs/measurements/h200-sm90-log.md, run 17).
_APART = Apart(most_rows=256, min_rows=64)
# From how many query rows of a request on this path is faster than `sm80`, by padded value columns: what the
# records h200-standard-sm80.json and h200-standard-sm90.json show; a test holds it to them.
FEWEST_ROWS = {128: 17, 256: 17, 384: 17, 512: 17}


@dataclass(frozen=True, slots=True)
class HopperPath:
    """wgmma tensor cores of sm_90."""

    name: str = "sm90"

    def refuses(self, call: Call, properties: DeviceProperties, options: PathOptions) -> str | None:
        """Return why not: another GPU, a debug operator, another row tile, or wider heads."""
        if properties.capability != (9, 0):
            return f"needs compute capability 9.0, the GPU has {'.'.join(map(str, properties.capability))}"
        if options.debug:
            return "debug kernels are the baseline's"
        if options.row_tile not in (None, ROW_TILE):
            return f"row tiles are {ROW_TILE} rows tall, asked for {options.row_tile}"
        if self._shape(call, properties) is None:
            return (
                f"head sizes ({call.head_size}, {call.v_head_size}) are above "
                f"({MAX_SLABS * SLAB_CHANNELS}, {MAX_V_HEAD_SIZE}), or their tiles above "
                f"{properties.shared_bytes} bytes"
            )
        return None

    def plan(
        self, call: Call, bounds: Bounds, properties: DeviceProperties, options: PathOptions
    ) -> PathPlan:
        """Return schedule, attend and combine.

        Raises:
            ArgumentMismatch: The split is no multiple of a tile, or the bounds hold more rows than an int32
                counts.
        """
        shape = self._shape(call, properties)
        head_size, v_head_size = call.head_size or 0, call.v_head_size or 0
        if shape is None:
            raise ArgumentMismatch("kernel", "head sizes", (head_size, v_head_size), "sizes that it serves")
        costs = _COSTS[shape.kv_tile, score_warpgroups(head_size, v_head_size)]
        first, width = rotated_slabs(call)
        terms = {None: TWO_TERM_KEYS, 1: 0, 2: INT32_MAX}[options.weight_terms]

        def attend(sizes: SplitSizes) -> LaunchSpec:
            return LaunchSpec(
                shape.signature(element_type(call), head_size, v_head_size),
                (sizes.row_tiles, sizes.slices, 1),
                (shape.threads, 1, 1),
                shape.shared_bytes(head_size, v_head_size),
                programmatic=True,
                maps=MapPlan(shape.kv_tile, slabs_of(head_size, v_head_size), first, width),
            )

        return split_plan(
            call,
            bounds,
            shape,
            attend,
            multiprocessors=properties.multiprocessors,
            blocks_per_multiprocessor=1,
            split_rows=options.split_rows,
            costs=replace(costs, slow_rows=terms),
            partials=PAIRED_PARTIALS,
            query_channels=(first, width),
            apart=_APART,
            own_regions={"progress": 8},
            description=f"row tile {ROW_TILE}, KV tile {shape.kv_tile}, {shape.stages} stages, wgmma",
        )

    def yields(self, call: Call, bounds: Bounds, options: PathOptions) -> str | None:
        """Return why another path is measured to be faster, or None."""
        rows = query_rows(call, bounds)
        fewest = FEWEST_ROWS[padded_v_head_size(call.v_head_size or 0)]
        if rows < fewest:
            return f"{rows} query rows a request, measured to gain from {fewest} on"
        if small := small_pairs(call, bounds, options):
            pairs = bounds.max_tokens * bounds.max_context
            return (
                f"{call.num_heads} heads, {pairs} pairs of a token and a key, measured to gain above {small}"
            )
        return None

    def _shape(self, call: Call, properties: DeviceProperties) -> HopperShape | None:
        return shape_for(call.head_size or 0, call.v_head_size or 0, properties.shared_bytes)


def rotated_slabs(call: Call) -> tuple[int, int]:
    """Return the first channel and the width of the whole slabs that hold a query's rotated channels."""
    if not call.rotary:
        return 0, 0
    first = call.rotary_offset // SLAB_CHANNELS * SLAB_CHANNELS
    end = -(-(call.rotary_offset + (call.rotary_dim or 0)) // SLAB_CHANNELS) * SLAB_CHANNELS
    return first, min(end, call.head_size or 0) - first
