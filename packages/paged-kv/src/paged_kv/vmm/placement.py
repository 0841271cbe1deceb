"""Where the bindings of a cache start in its arena, and which granules each of them can touch.

Aligned to granules, no two bindings share one: what each binding touches adds up to what is there. Packed,
small bindings share granules: 48 of 128 KiB fit in 3 or 4 granules of 2 MiB instead of 48.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from paged_kv.errors import GranularityMismatch, InvalidGeometry
from paged_kv.geometry import as_size, is_integer

from .geometry import MAX_BYTES, KvCacheGeometry

Int64Array = npt.NDArray[np.int64]
PACKED_ALIGN = 256
MAX_GRANULES = 1 << 24


class BasePlacement(StrEnum):
    """Whether every binding starts a granule of its own."""

    GRANULE_ALIGNED = "granule_aligned"
    PACKED = "packed"


def require_granularity(granularity: int) -> int:
    """Refuse a granule that is no power of two.

    Raises:
        GranularityMismatch: not a positive power of two.
    """
    if not is_integer(granularity) or not 0 < granularity <= MAX_BYTES or granularity & (granularity - 1):
        raise GranularityMismatch(
            f"the granule is {granularity!r} bytes; it must be a power of two of at most {MAX_BYTES}",
            given=repr(granularity),
        )
    return int(granularity)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Byte offsets of the bindings in their arena.

    Attributes:
        geometry: the bindings.
        granularity: bytes a granule.
        bases: ``(bindings,)`` int64 first byte of each.
        sizes: ``(bindings,)`` int64 reserved bytes of each.
        first: ``(bindings,)`` int64 first granule of each.
        cells: ``(bindings + 1,)`` int64; binding ``b`` owns the cells ``[cells[b], cells[b + 1])``, one for
            each granule that its reservation touches.
        cell_granule: ``(cells,)`` int64 the granule of each cell.
    """

    geometry: KvCacheGeometry
    granularity: int
    bases: Int64Array
    sizes: Int64Array
    first: Int64Array = field(init=False)
    cells: Int64Array = field(init=False)
    cell_granule: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        first = self.bases // self.granularity
        counts = (self.bases + self.sizes - 1) // self.granularity - first + 1
        cells = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
        granule = np.repeat(first - cells[:-1], counts) + np.arange(int(cells[-1]))
        for name, array in (("first", first), ("cells", cells), ("cell_granule", granule)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        self.bases.flags.writeable = self.sizes.flags.writeable = False

    @classmethod
    def of(
        cls,
        geometry: KvCacheGeometry,
        granularity: int,
        placement: BasePlacement = BasePlacement.GRANULE_ALIGNED,
        *,
        align: int = PACKED_ALIGN,
        phase: int = 0,
    ) -> Placement:
        """Lay the bindings out in their order.

        Args:
            geometry: the bindings.
            granularity: bytes a granule.
            placement: see `BasePlacement`.
            align: what a packed base is a multiple of: a power of two, as the tensors need it.
            phase: where the first packed binding starts.

        Example:
            >>> from paged_kv.vmm import KvLayout
            >>> small = KvCacheGeometry.uniform(
            ...     KvLayout.SEQ_MAJOR, layers=24, kv_heads=2, head_dim=64, capacity=512)
            >>> [Placement.of(small, 2 << 20, how).num_granules for how in BasePlacement]
            [48, 3]

        Raises:
            GranularityMismatch: the granule, or the alignment, is no power of two.
            InvalidGeometry: the arena would have more than 2**24 granules or 2**56 bytes, the phase is not
                aligned, or there is no such placement.
        """
        if not isinstance(placement, BasePlacement):
            raise InvalidGeometry(
                f"placement is {placement!r}; it must be a BasePlacement", given=repr(placement)
            )
        unit = require_granularity(granularity)
        step = require_granularity(align) if placement is BasePlacement.PACKED else unit
        start = as_size("phase", phase, 0, MAX_BYTES)
        if step > unit or start % step:
            raise InvalidGeometry(
                f"packing to {step} bytes from byte {start} on, in granules of {unit}: the granule must be a "
                "multiple of the alignment, and so must the first byte",
                align=step,
                phase=start,
                granularity=unit,
            )
        bases = []
        for binding in geometry.bindings:
            bases.append(start)
            start += -(-binding.reserved_bytes // step) * step
        if start > MAX_GRANULES * unit or start + unit > MAX_BYTES:
            raise InvalidGeometry(
                f"the arena takes {start} bytes, {-(-start // unit)} granules; at most {MAX_GRANULES} "
                f"granules and {MAX_BYTES - unit} bytes can be kept account of; take larger granules",
                given=start,
                granules=-(-start // unit),
                maximum=MAX_GRANULES,
            )
        sizes = [binding.reserved_bytes for binding in geometry.bindings]
        return cls(geometry, unit, np.array(bases, dtype=np.int64), np.array(sizes, dtype=np.int64))

    @property
    def num_granules(self) -> int:
        """Granules of the arena."""
        return int(self.cell_granule.max()) + 1

    @property
    def total_bytes(self) -> int:
        """Bytes of addresses that the arena reserves: whole granules."""
        return self.num_granules * self.granularity
