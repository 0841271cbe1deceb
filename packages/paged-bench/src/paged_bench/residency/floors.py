"""What the planner alone says: how memory follows the tokens by layout, and by the place of the bindings."""

from __future__ import annotations

from paged_kv.vmm import BasePlacement, CommitPlanner, GranuleTable, KvLayout, Placement

from paged_bench.residency.results import FloorResult, PlacementResult
from paged_bench.residency.shapes import KvShape

LAYOUTS = (KvLayout.HEAD_MAJOR, KvLayout.SEQ_MAJOR, KvLayout.TOKEN_MAJOR)


def floors(shape: KvShape, granularity: int) -> tuple[FloorResult, ...]:
    """Granules of one sequence at powers of two of tokens, for the layouts with a fixed stride."""
    tokens = tuple(1 << power for power in range(shape.capacity.bit_length()))
    curves = []
    for layout in LAYOUTS:
        placement = Placement.of(shape.geometry(layout), granularity)
        planner, table = CommitPlanner(placement), GranuleTable(placement)
        granules = tuple(planner.plan(table, count).physical_bytes // granularity for count in tokens)
        curves.append(FloorResult(shape.name, str(layout), tokens, granules))
    return tuple(curves)


def placements(shape: KvShape, tokens: int, granularity: int) -> tuple[PlacementResult, ...]:
    """One sequence of `tokens` tokens, sequence-major, aligned to granules and packed."""
    rows = []
    for how in BasePlacement:
        placement = Placement.of(shape.geometry(KvLayout.SEQ_MAJOR), granularity, how)
        plan = CommitPlanner(placement).plan(GranuleTable(placement), tokens)
        rows.append(
            PlacementResult(
                shape.name,
                str(how),
                tokens,
                plan.logical_bytes,
                plan.attributed_bytes,
                plan.physical_bytes,
            )
        )
    return tuple(rows)
