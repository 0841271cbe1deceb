"""Taking memory back: unmap what nobody claims any more, and say what could not be unmapped or released."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged_kv.errors import DriverCallFailed

from .granules import GranuleTable
from .handle_pool import HandlePool
from .planner import DecommitPlan


@dataclass(frozen=True, slots=True)
class DecommitOutcome:
    """What giving back did.

    Attributes:
        refunded_bytes: bytes that are mapped no longer.
        pooled: handles that the pool kept.
        quarantined_granules: granules that could not be unmapped: still billed, never used again.
        quarantined_handles: handles that could not be released: still owned.
    """

    refunded_bytes: int
    pooled: int
    quarantined_granules: tuple[int, ...] = ()
    quarantined_handles: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing was quarantined."""
        return not self.quarantined_granules and not self.quarantined_handles


def apply_decommit(
    pool: HandlePool, table: GranuleTable, address: int, plan: DecommitPlan
) -> DecommitOutcome:
    """Unmap the plan's granules, one by one; inside the gate, with nothing in flight.

    A granule that cannot be unmapped is poisoned and the next one is tried. When an interrupt ends it early,
    what is still mapped is still claimed.
    """
    size = pool.granule
    handles: list[int] = []
    poisoned: list[int] = []
    try:
        for granule in plan.unmapped.tolist():
            try:
                pool.calls("unmap", pool.driver.unmap, address + granule * size, size)
            except DriverCallFailed:
                poisoned.append(granule)
            else:
                handles.append(table.apply_unmapped(granule))
    finally:
        left = plan.unmapped[len(handles) + len(poisoned) :]
        granules = table.placement.cell_granule[plan.cells]
        table.apply_unclaim(plan.cells[~np.isin(granules, left)] if len(left) else plan.cells)
        pool.poison([table.handles[granule] for granule in poisoned])
        for granule in poisoned:
            table.apply_poison(granule, table.handles[granule])
        pool.governor.unmapped(pool.holder, len(handles) * size)
        kept, stranded = pool.give(handles)
    return DecommitOutcome(len(handles) * size, kept, tuple(poisoned), stranded)
