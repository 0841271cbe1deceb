"""A read-only window on the manager's arrays, for code that must not change anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .block_table import BlockTable
from .geometry import PageGeometry
from .state import KVState

Int64Array = npt.NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class KVView:
    """Live, read-only arrays of one manager; they change as the manager does.

    Attributes:
        geometry: the pool.
        cells: ``(max_sequences, max_blocks_per_sequence)`` int32 page ids, PAD elsewhere.
        claims: ``(num_blocks,)`` int64, see `paged_kv.block_pool`.
        row_state: ``(max_sequences,)`` uint8.
        seq_len: ``(max_sequences,)`` int64 committed tokens.
        settled: ``(max_sequences,)`` int64 tokens whose step is complete.
        n_blocks: ``(max_sequences,)`` int64, one past the last live column.
        first_block: ``(max_sequences,)`` int64, the first live column.
        version: ``(max_sequences,)`` int64, changes with every change that is not an append.
    """

    geometry: PageGeometry
    cells: npt.NDArray[np.int32]
    flat: npt.NDArray[np.int32]
    claims: Int64Array
    row_state: npt.NDArray[np.uint8]
    seq_len: Int64Array
    settled: Int64Array
    n_blocks: Int64Array
    first_block: Int64Array
    version: Int64Array
    _table: BlockTable

    @classmethod
    def of(cls, state: KVState) -> KVView:
        """Views of the arrays of `state`, with the writeable flag off."""
        table = state.table
        return cls(
            geometry=state.geometry,
            cells=_read_only(table.cells),
            flat=_read_only(table.flat),
            claims=_read_only(state.pool.claims),
            row_state=_read_only(table.state),
            seq_len=_read_only(table.seq_len),
            settled=_read_only(table.settled),
            n_blocks=_read_only(table.n_blocks),
            first_block=_read_only(table.first_block),
            version=_read_only(table.version),
            _table=table,
        )

    @property
    def last_version(self) -> int:
        """The version that the last change of any row got."""
        return self._table.last_version

    def resolve(self, handles: Int64Array) -> Int64Array:
        """Row numbers of current, distinct handles.

        Raises:
            UnknownSequence, StaleSequenceHandle, PagedDuplicateRequest: see `BlockTable`.
        """
        slots = self._table.resolve(handles)
        self._table.require_distinct(slots)
        return slots


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
