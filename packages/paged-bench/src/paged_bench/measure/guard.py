"""Whether the GPU is ours alone: before anything is measured, and between cases.

Invariant: the first look comes before this process opens the GPU, so whatever is seen then belongs to
somebody else, also in a container, where process ids are those of another namespace.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paged_bench.errors import MeasurementError
from paged_bench.measure.nvml import GpuState

_LOOKS, _PAUSE = 3, 0.2
_BUSY_PER_CENT = 5
_ADVICE = "wait until it is free, choose another with CUDA_VISIBLE_DEVICES, or measure even so with --force"


class Guard:
    """Watches one GPU.

    Args:
        look: Returns its present state.
        force: Note what is wrong instead of refusing.
        sleep: Waits between looks.
    """

    def __init__(
        self,
        look: Callable[[], GpuState],
        *,
        force: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._look = look
        self._force = force
        self._sleep = sleep
        self._others: frozenset[int] | None = None
        self._known: frozenset[int] | None = None
        self.notes: list[str] = []

    @property
    def others(self) -> int | None:
        """Processes that were there before this one; None where that could not be asked."""
        return None if self._others is None else len(self._others)

    def before(self) -> GpuState:
        """Look before this process opens the GPU.

        Raises:
            MeasurementError: It is cut into MIG slices, busy, or others compute on it.
        """
        states = []
        for _ in range(_LOOKS):
            states.append(self._look())
            if len(states) < _LOOKS:
                self._sleep(_PAUSE)
        state = states[-1]
        if state.mig:
            self._refuse("is cut into MIG slices, whose ceilings are not those of the GPU", "disable MIG")
        self._others = state.processes
        if self._others is None:
            self.notes.append("whether other processes compute on the GPU could not be asked")
        if self._others:
            self._refuse(f"{len(self._others)} other process(es) compute on it")
        busy = min((one.utilization or 0) for one in states)
        if busy > _BUSY_PER_CENT:
            self._refuse(f"is busy: {busy} % at {_LOOKS} looks in a row")
        return state

    def opened(self) -> None:
        """Note who is there now that this process has opened the GPU."""
        self._known = self._look().processes

    def between(self) -> None:
        """Look between two cases.

        Raises:
            MeasurementError: Somebody has come.
        """
        now = self._look().processes
        if now is None or self._known is None:
            return
        came = now - self._known
        if came:
            self._known |= came
            self._refuse(f"{len(came)} other process(es) began to compute on it")

    def _refuse(self, problem: str, advice: str = _ADVICE) -> None:
        if not self._force:
            raise MeasurementError("GPU", problem, advice)
        self.notes.append(problem)
