"""What rows must be before an operation touches them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .block_table import RESIDENT, SWAPPED
from .errors import InvalidTenant, InvalidWindow, PageNotResident, PositionEvicted, UnsupportedSink
from .geometry import INT32_MAX, is_integer
from .state import KVState

Int64Array = npt.NDArray[np.int64]


def require_window(window: int, sink: int) -> None:
    """Refuse windows and sinks that the table cannot express.

    Raises:
        InvalidWindow: not an integer, negative, or not an int32.
        UnsupportedSink: any sink.
    """
    if not is_integer(window) or not 0 <= window <= INT32_MAX:
        raise InvalidWindow(
            f"window is {window!r}; it must be 0 (none) or a positive int32", window=repr(window)
        )
    if sink:
        raise UnsupportedSink(f"sink is {sink}; attention sinks are not supported, it must be 0", sink=sink)


def require_tenant(tenant: str | None) -> None:
    """Refuse tenants that are not named by a string.

    Raises:
        InvalidTenant: neither a string nor None.
    """
    if tenant is not None and not isinstance(tenant, str):
        raise InvalidTenant(f"tenant is {tenant!r}; name it with a string", tenant=repr(tenant))


def require_resident(state: KVState, slots: Int64Array) -> None:
    """Refuse rows that are on the host.

    Raises:
        PageNotResident: with the first such row.
    """
    away = state.table.state[slots] == SWAPPED
    if away.any():
        row = int(slots[np.flatnonzero(away)[0]])
        raise PageNotResident(f"row {row} is swapped out; swap it in first", row=row)


def require_one(state: KVState, slot: int) -> None:
    """As `require_idle` and `require_resident`, for one row."""
    if state.step is not None or state.table.state[slot] != RESIDENT:
        slots = np.array([slot])
        state.require_idle(slots)
        require_resident(state, slots)


def require_held(state: KVState, slots: Int64Array, lengths: Int64Array) -> None:
    """A row that gave up pages must still hold the whole window in front of its new end."""
    table = state.table
    first = table.first_block[slots] << state.geometry.block_shift
    lost = (first > 0) & (first > lengths - table.window[slots])
    if lost.any():
        index = int(np.flatnonzero(lost)[0])
        raise PositionEvicted(
            f"row {int(slots[index])} holds positions from {int(first[index])} on; at length "
            f"{int(lengths[index])} its window of {int(table.window[slots[index]])} would reach before them",
            row=int(slots[index]),
            first=int(first[index]),
            given=int(lengths[index]),
        )
