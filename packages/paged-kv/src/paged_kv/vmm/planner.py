"""Which granules a number of tokens needs, and what is new about that. Arithmetic only: nothing is mapped.

Three byte numbers, never one. *Attributed* adds up, over the bindings, the granules that each touches;
*physical* counts every granule once; *billed* counts those that are not mapped yet. *Logical* is what the
tokens themselves take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paged_kv.errors import CommitOutOfRange, ForeignPlan
from paged_kv.geometry import INT64_MAX, as_size

from .geometry import BindingGeometry, live_prefix_ranges
from .granules import GranuleTable, runs_of
from .placement import Placement

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class CommitPlan:
    """What committing a number of tokens means for one state of an arena.

    Attributes:
        table: the arena's state that this was planned for.
        version: the state's version then.
        tokens: tokens a row.
        cells: int64, claims to add.
        newly_mapped: int64, ascending, granules to create and map.
        run_first: int64, the first granule of each run of neighbours among them.
        run_count: int64, the granules of each run.
        logical_bytes: bytes of the live ranges.
        attributed_bytes: granules that each binding's live ranges touch, over all bindings, in bytes.
        physical_bytes: granules that any of them touches, in bytes.
    """

    table: GranuleTable
    version: int
    tokens: int
    cells: Int64Array
    newly_mapped: Int64Array
    run_first: Int64Array
    run_count: Int64Array
    logical_bytes: int
    attributed_bytes: int
    physical_bytes: int

    @property
    def billed_bytes(self) -> int:
        """Bytes that must be mapped for it."""
        return len(self.newly_mapped) * self.table.granularity

    @property
    def is_committed(self) -> bool:
        """Whether there is nothing to do."""
        return not len(self.cells)


@dataclass(frozen=True, slots=True, eq=False)
class DecommitPlan:
    """What keeping only a number of tokens gives back.

    Attributes:
        table: the arena's state that this was planned for.
        version: the state's version then.
        tokens: tokens a row that are kept.
        cells: int64, claims to take back.
        unmapped: int64, ascending, granules that nobody claims afterwards.
    """

    table: GranuleTable
    version: int
    tokens: int
    cells: Int64Array
    unmapped: Int64Array

    @property
    def refunded_bytes(self) -> int:
        """Bytes that need not be mapped any more."""
        return len(self.unmapped) * self.table.granularity


class CommitPlanner:
    """Plans for one placement of one cache.

    Example:
        >>> from paged_kv.vmm import BasePlacement, KvCacheGeometry, KvLayout
        >>> small = KvCacheGeometry.uniform(
        ...     KvLayout.SEQ_MAJOR, layers=24, kv_heads=2, head_dim=64, capacity=512)
        >>> placement = Placement.of(small, 2 << 20, BasePlacement.PACKED)
        >>> plan = CommitPlanner(placement).plan(GranuleTable(placement), tokens=64)
        >>> plan.attributed_bytes >> 20, plan.physical_bytes >> 20, plan.logical_bytes
        (96, 6, 786432)
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._shift = placement.granularity.bit_length() - 1
        groups: dict[BindingGeometry, list[int]] = {}
        for number, binding in enumerate(placement.geometry.bindings):
            groups.setdefault(binding, []).append(number)
        self._groups = [(binding, np.array(numbers)) for binding, numbers in groups.items()]

    def plan(self, table: GranuleTable, tokens: int, bucket: int | None = None) -> CommitPlan:
        """What must be claimed and mapped so that `tokens` tokens of every row are backed.

        Args:
            table: the state to start from.
            tokens: tokens a row.
            bucket: the present capacity of growing layouts; None for the reserved one.

        Raises:
            CommitOutOfRange: more tokens than are reserved.
            InvalidGeometry: not an integer, or negative.
            ForeignPlan: the state belongs to another placement.
        """
        wanted, logical = self._wanted(table, tokens, bucket)
        granule = self.placement.cell_granule
        cells = np.flatnonzero(wanted & ~table.claimed)
        new = np.zeros(len(table.refs), dtype=np.bool_)
        new[granule[cells]] = True
        newly_mapped = np.flatnonzero(new & (table.refs == 0))
        touched = np.zeros(len(table.refs), dtype=np.bool_)
        touched[granule[wanted]] = True
        return CommitPlan(
            table,
            table.version,
            int(tokens),
            cells,
            newly_mapped,
            *runs_of(newly_mapped),
            logical_bytes=logical,
            attributed_bytes=int(np.count_nonzero(wanted)) * self.placement.granularity,
            physical_bytes=int(np.count_nonzero(touched)) * self.placement.granularity,
        )

    def shrink_plan(self, table: GranuleTable, tokens: int, bucket: int | None = None) -> DecommitPlan:
        """What keeping only `tokens` tokens of every row gives back.

        Raises:
            CommitOutOfRange, InvalidGeometry, ForeignPlan: as for `plan`.
        """
        wanted, _ = self._wanted(table, tokens, bucket)
        cells = np.flatnonzero(table.claimed & ~wanted)
        granules, dropped = np.unique(self.placement.cell_granule[cells], return_counts=True)
        unmapped = granules[table.refs[granules] == dropped]
        return DecommitPlan(table, table.version, int(tokens), cells, unmapped)

    def _wanted(self, table: GranuleTable, tokens: int, bucket: int | None) -> tuple[BoolArray, int]:
        """The cells that the live ranges touch, and the bytes of those ranges."""
        if table.placement is not self.placement:
            raise ForeignPlan(
                "the state belongs to another placement; give the arena's own planner its table"
            )
        self._require(tokens)
        cells, first = self.placement.cells, self.placement.first
        wanted = np.zeros(len(table.claimed), dtype=np.bool_)
        logical = 0
        for binding, numbers in self._groups:
            ranges = live_prefix_ranges(binding, tokens, bucket)
            if not len(ranges):
                continue
            logical += int((ranges[:, 1] - ranges[:, 0]).sum()) * len(numbers)
            places = ranges[None, :, :] + self.placement.bases[numbers, None, None]
            places[:, :, 1] -= 1
            places >>= self._shift
            places += (cells[numbers] - first[numbers])[:, None, None]
            starts, last = places[:, :, 0].ravel(), places[:, :, 1].ravel()
            counts = last - starts + 1
            ends = np.cumsum(counts)
            wanted[np.repeat(starts - ends + counts, counts) + np.arange(int(ends[-1]))] = True
        return wanted, logical

    def _require(self, tokens: int) -> None:
        limit = self.placement.geometry.capacity
        if as_size("tokens", tokens, 0, INT64_MAX) > limit:
            raise CommitOutOfRange(
                f"{tokens} tokens asked for, {limit} are reserved; end the sequence, or reserve more",
                needed=int(tokens),
                maximum=limit,
            )
