"""Physical granules that wait to be mapped: a growth that finds them here has none to create.

Every handle of an arena comes from its pool and goes back to it. A handle is here, or it is out with the
arena, or it is quarantined because it could not be released; the holder's account says the same. Driver
calls are made without the pool's lock.
"""

from __future__ import annotations

import threading

from paged_kv.errors import DriverCallFailed, ForeignHandle, GranularityMismatch
from paged_kv.geometry import INT32_MAX, as_size

from .capture import PROCESS_GATE, CaptureGate
from .driver import DriverCalls, VmmDriver
from .governor import MemoryGovernor
from .lease import Holder
from .ledger import AdmissionRefused
from .placement import require_granularity


class HandlePool:
    """Handles of one granule each, for one holder of one governor. A holder has one pool.

    Args:
        driver: makes them.
        governor: says whether there may be more.
        holder: who pays. The pool becomes what is asked when another holder needs bytes.
        granule: bytes; None for the driver's recommended granularity.
        retain: how many of the handles that come back from the arena are kept; the rest are released.
        gate: keeps them apart from captures.

    Raises:
        GranularityMismatch: no power of two, or no multiple of what the driver maps.
        ForeignGrant: not a holder of this governor.
        DriverCallFailed: the granularity could not be asked.
    """

    def __init__(
        self,
        driver: VmmDriver,
        governor: MemoryGovernor,
        holder: Holder,
        granule: int | None = None,
        *,
        retain: int = 0,
        gate: CaptureGate = PROCESS_GATE,
    ) -> None:
        self.driver, self.governor, self.holder, self.gate = driver, governor, holder, gate
        self.calls = DriverCalls(driver)
        least, recommended = self.calls("granularity", driver.granularity)
        require_granularity(least)
        self.granule = require_granularity(recommended if granule is None else granule)
        if self.granule % least:
            raise GranularityMismatch(
                f"the granule is {self.granule} bytes; the driver maps multiples of {least}",
                given=self.granule,
                expected=least,
            )
        self.retain = as_size("retain", retain, 0, INT32_MAX)
        self._free: list[int] = []
        self._out: set[int] = set()
        self._poisoned: set[int] = set()
        self._quarantined: list[int] = []
        self._lock = threading.Lock()
        governor.set_reclaim(holder, self.reclaim)

    @property
    def count(self) -> int:
        """Handles that wait."""
        return len(self._free)

    @property
    def num_out(self) -> int:
        """Handles that the arena has mapped, those of poisoned granules included."""
        return len(self._out) + len(self._poisoned)

    @property
    def num_quarantined(self) -> int:
        """Handles that could not be released."""
        return len(self._quarantined)

    def prefill(self, count: int) -> int | AdmissionRefused:
        """Create handles until `count` wait. Call it off the step path; each handle is a driver call.

        Two threads that call it at once may each create what is missing; `trim` releases the surplus.

        Returns:
            How many were created, or why there may not be so many.

        Raises:
            InvalidGeometry: not a count.
            CaptureInProgress: this thread captures.
            GrantOpen: this thread holds a grant.
            DriverCallFailed: one could not be created; those before it were given back.
        """
        self.gate.require_not_capturing()
        missing = max(0, as_size("count", count, 0, INT32_MAX) - self.count)
        if not missing:
            return 0
        made: list[int] = []
        refused = self.governor.claim_handles(self.holder, missing * self.granule)
        if refused is not None:
            return refused
        try:
            for _ in range(missing):
                with self.gate.memory():
                    made.append(self.calls("create", self.driver.create_handle, self.granule))
        except BaseException:
            self.governor.released(self.holder, (missing - len(made)) * self.granule)
            self.apply_release(made)
            raise
        self._apply_pool(made)
        return missing

    def take(self, count: int) -> list[int]:
        """At most `count` of the waiting handles, to be mapped."""
        with self._lock:
            taken = self._free[len(self._free) - min(count, len(self._free)) :]
            del self._free[len(self._free) - len(taken) :]
            self._out.update(taken)
            return taken

    def create(self) -> int:
        """One new handle, to be mapped under a grant that pays for it; call it inside the gate.

        Raises:
            DriverCallFailed: it could not be created.
        """
        handle = self.calls("create", self.driver.create_handle, self.granule)
        with self._lock:
            self._out.add(handle)
        return handle

    def destroy(self, handle: int) -> None:
        """Release a handle of `create` that was never paid for.

        Raises:
            DriverCallFailed: it could not be released; it is quarantined.
        """
        self._require_out([handle])
        with self._lock:
            self._out.discard(handle)
        try:
            self.calls("undo", self.driver.release_handle, handle)
        except BaseException:
            self._quarantined.append(handle)
            raise

    def give(self, handles: list[int]) -> tuple[int, int]:
        """Take unmapped handles back: keep up to `retain`, release the rest; call it inside the gate.

        Returns:
            How many were kept, and how many could not be released and are quarantined.

        Raises:
            ForeignHandle: a handle was not taken from this pool, or is given back twice.
        """
        self._require_out(handles)
        with self._lock:
            self._out.difference_update(handles)
            kept = max(0, min(self.retain - len(self._free), len(handles)))
        self._apply_pool(handles[:kept])
        return kept, self.apply_release(handles[kept:])

    def put_back(self, handles: list[int]) -> None:
        """Return handles that were taken and not used, whatever `retain` says.

        Raises:
            ForeignHandle: a handle was not taken from this pool, or is given back twice.
        """
        self._require_out(handles)
        with self._lock:
            self._out.difference_update(handles)
            self._free += handles

    def poison(self, handles: list[int]) -> None:
        """Note handles whose granules could not be unmapped: nobody gives them back any more.

        Raises:
            ForeignHandle: a handle was not taken from this pool.
        """
        self._require_out(handles)
        with self._lock:
            self._out.difference_update(handles)
            self._poisoned.update(handles)

    def trim(self, keep: int = 0) -> int:
        """Release waiting handles until `keep` are left; those that an open grant counts on stay.

        Returns:
            How many were released; those that could not be are quarantined.

        Raises:
            InvalidGeometry: not a count.
            CaptureInProgress: this thread captures.
        """
        left = as_size("keep", keep, 0, INT32_MAX)
        with self.gate.memory():
            with self._lock:
                wanted = max(0, len(self._free) - left)
                count = self.governor.withdraw(self.holder, wanted * self.granule) // self.granule
                gone = self._free[len(self._free) - count :]
                del self._free[len(self._free) - count :]
            return len(gone) - self.apply_release(gone)

    def reclaim(self, nbytes: int) -> int:
        """Give way to another holder: release waiting handles for `nbytes`; the bytes that can be spared."""
        self.trim(max(0, self.count - -(-nbytes // self.granule)))
        return nbytes

    def close(self) -> None:
        """Release every waiting handle.

        Raises:
            CaptureInProgress: this thread captures.
            ForeignHandle: the arena still has some.
        """
        if self._out:
            raise ForeignHandle(
                f"{len(self._out)} handles are still mapped; close the arena first", count=len(self._out)
            )
        self.trim()

    def apply_release(self, handles: list[int]) -> int:
        """Release handles that are accounted as on the way; how many could not be.

        An interrupt leaves the handle of that moment quarantined, as nobody knows whether it is gone, and the
        others waiting.
        """
        failed = 0
        for number, handle in enumerate(handles):
            try:
                self.calls("release", self.driver.release_handle, handle)
            except BaseException as error:
                self._quarantined.append(handle)
                self.governor.quarantined(self.holder, self.granule)
                failed += 1
                if not isinstance(error, DriverCallFailed):
                    self._apply_pool(handles[number + 1 :])
                    raise
            else:
                self.governor.released(self.holder, self.granule)
        return failed

    def _apply_pool(self, handles: list[int]) -> None:
        """Let handles that are on the way wait here; in the account and the list at one moment."""
        with self._lock:
            self._free += handles
            self.governor.pooled(self.holder, len(handles) * self.granule)

    def _require_out(self, handles: list[int]) -> None:
        unknown = [handle for handle in handles if handle not in self._out]
        if unknown or len(set(handles)) != len(handles):
            raise ForeignHandle(
                f"{len(unknown)} of {len(handles)} handles were not taken from this pool, or are given back "
                f"twice, first {unknown[:1] or handles[:1]}",
                count=len(unknown),
            )
