"""What is mapped in one arena, who claims it, and what must never be used again.

A binding claims a granule through the cell that it has for it, so a second commit of the same bytes finds
its claims and does nothing. A granule's references are the claims on it; it is mapped while it has one, and
for good once it is poisoned. `version` moves with every change, so that a plan made before it is known to
be old.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .placement import Placement

Int64Array = npt.NDArray[np.int64]


class GranuleTable:
    """Claims, references, handles and poison of the granules of one `Placement`.

    Attributes:
        placement: whose cells and granules these are.
        claimed: ``(cells,)`` bool.
        refs: ``(granules,)`` int32 claims on each granule.
        poisoned: ``(granules,)`` bool, out of service.
        handles: the physical handle of each mapped granule, poisoned ones included.
        version: changes with every change.
    """

    __slots__ = ("claimed", "handles", "placement", "poisoned", "refs", "version")

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.claimed = np.zeros(len(placement.cell_granule), dtype=np.bool_)
        self.refs = np.zeros(placement.num_granules, dtype=np.int32)
        self.poisoned = np.zeros(placement.num_granules, dtype=np.bool_)
        self.handles: dict[int, int] = {}
        self.version = 0

    @property
    def granularity(self) -> int:
        """Bytes a granule."""
        return self.placement.granularity

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped, poisoned granules included: what is physically there."""
        return len(self.handles) * self.granularity

    @property
    def attributed_bytes(self) -> int:
        """Granules that each binding claims, added up over bindings: shared granules count for each."""
        return int(np.count_nonzero(self.claimed)) * self.granularity

    @property
    def poisoned_bytes(self) -> int:
        """Bytes out of service."""
        return int(np.count_nonzero(self.poisoned)) * self.granularity

    def apply_commit(self, cells: Int64Array, granules: list[int], handles: list[int]) -> None:
        """Claim `cells` and note the handles of the granules that were mapped for them."""
        self.claimed[cells] = True
        np.add.at(self.refs, self.placement.cell_granule[cells], 1)
        self.handles.update(zip(granules, handles, strict=True))
        self.version += 1

    def apply_unclaim(self, cells: Int64Array) -> None:
        """Take back claims; granules without one are unmapped next."""
        self.claimed[cells] = False
        np.subtract.at(self.refs, self.placement.cell_granule[cells], 1)
        self.version += 1

    def apply_unmapped(self, granule: int) -> int:
        """Forget a granule that is no longer mapped; its handle."""
        self.version += 1
        return self.handles.pop(granule)

    def apply_poison(self, granule: int, handle: int) -> None:
        """Take a granule, which stays mapped to `handle`, out of service for good."""
        self.poisoned[granule] = True
        self.handles[granule] = handle
        self.version += 1


def runs_of(granules: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Ascending granules as runs of neighbours: first granule and count of each.

    Example:
        >>> first, count = runs_of(np.array([3, 4, 5, 9]))
        >>> first.tolist(), count.tolist()
        ([3, 9], [3, 1])
    """
    if not len(granules):
        return granules, granules
    starts = np.concatenate(([0], np.flatnonzero(np.diff(granules) != 1) + 1))
    counts = np.diff(np.append(starts, len(granules)))
    return granules[starts], counts
