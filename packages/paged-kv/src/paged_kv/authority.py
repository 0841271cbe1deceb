"""What every operation of the manager starts and ends with.

One thread owns the manager; event callbacks may not call it; observers are told when an operation is done.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from .errors import Reentrancy, StorageAlreadyOwned, WrongThread
from .geometry import PageGeometry
from .outcomes import CapacityDeferred, UnserviceableRequest
from .state import KVState
from .vectors import IntVector, as_handles
from .view import KVView

Int64Array = npt.NDArray[np.int64]
Result = TypeVar("Result")

_owners: WeakValueDictionary[Hashable, Authority] = WeakValueDictionary()


class Authority:
    """The state of one manager and the rules of calling it."""

    def __init__(self, state: KVState, storage: Hashable | None) -> None:
        if storage is not None and storage in _owners:
            raise StorageAlreadyOwned(
                f"storage {storage!r} already has a live manager; one cache has one authority",
                storage=repr(storage),
            )
        self._state = state
        self._view = KVView.of(state)
        self._owner = threading.get_ident()
        if storage is not None:
            _owners[storage] = self

    @property
    def geometry(self) -> PageGeometry:
        """The pool's geometry."""
        return self._state.geometry

    def view(self) -> KVView:
        """Read-only, live arrays for `PagedIndexPlan.build`."""
        return self._view

    def adopt(self) -> None:
        """Make the calling thread the owner. The former owner must have stopped calling."""
        self._owner = threading.get_ident()

    def _enter(self) -> KVState:
        caller = threading.get_ident()
        if caller != self._owner:
            raise WrongThread(
                f"thread {caller} calls a manager that thread {self._owner} owns; move it with adopt()",
                caller=caller,
                owner=self._owner,
            )
        if self._state.events.delivering:
            raise Reentrancy(
                "an event callback calls the manager; note the event and call after the operation"
            )
        return self._state

    def _rows(self, rows: IntVector | int) -> Int64Array:
        table = self._state.table
        slots = table.resolve(as_handles(rows))
        table.require_distinct(slots)
        return slots

    def _apply_leave(self, result: Result) -> Result:
        """Count refusals and tell observers what happened; the last thing that an operation does."""
        if isinstance(result, CapacityDeferred):
            self._state.tally.deferrals += 1
        elif isinstance(result, UnserviceableRequest):
            self._state.tally.unserviceable += 1
        if self._state.events.waiting:
            self._state.events.apply_deliver()
        return result
