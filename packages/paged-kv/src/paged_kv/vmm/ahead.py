"""Committing memory ahead of need, on a thread of its own, so that no step waits for the driver.

The step says how far it is (`poke`, two comparisons); the worker keeps the memory a margin ahead, again after
the controller has shrunk. It never publishes: that is the step's own growth, which then maps nothing. What
goes wrong here, a holder that fails to give way included, is kept, not raised: the step finds out when it
grows.
"""

from __future__ import annotations

import threading
from types import TracebackType

from paged_kv.geometry import INT64_MAX, as_size

from .growth import KvGrowthController
from .ledger import AdmissionRefused

MAX_PROBLEMS = 16


class CommitAhead:
    """A worker that keeps a controller's memory ahead; a context manager.

    Args:
        controller: whose memory.
        margin: tokens a row that stay committed beyond the step.
        stream: where new memory is zeroed: not the stream of the steps.

    Attributes:
        problems: the last refusals and errors.
        commits: how often memory was committed.
    """

    def __init__(self, controller: KvGrowthController, *, margin: int, stream: int = 0) -> None:
        self.controller, self._stream = controller, stream
        self._margin = as_size("margin", margin, 0, INT64_MAX)
        self._wanted = 0
        self._reached = 0
        self._wake = threading.Event()
        self._stopped = False
        self.problems: list[AdmissionRefused | Exception] = []
        self.commits = 0
        self._thread = threading.Thread(target=self._work, name="paged-kv-commit-ahead", daemon=True)

    def poke(self, tokens: int) -> None:
        """The step has `tokens` tokens a row. Costs two comparisons, and waits for nothing."""
        ahead = min(tokens + self._margin, self.controller.hard_max)
        if ahead > self._wanted or self.controller.committed < self._reached:
            self._reached = 0
            self._wanted = self.controller.capacity_for(ahead)
            self._wake.set()

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the worker, after the commit that it may be in.

        Raises:
            CaptureInProgress: this thread captures, and that commit may wait for it. The worker stops later.
        """
        self._stopped = True
        self._wake.set()
        self.controller.storage.gate.require_not_capturing()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> CommitAhead:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stopped:
                return
            self._commit(self._wanted)

    def _commit(self, tokens: int) -> None:
        try:
            done = self.controller.commit_ahead(tokens, stream=self._stream)
        except Exception as error:
            self._note(error)
            return
        if isinstance(done, AdmissionRefused):
            self._note(done)
            return
        self.commits += done is not None
        self._reached = tokens

    def _note(self, problem: AdmissionRefused | Exception) -> None:
        self.problems = [*self.problems, problem][-MAX_PROBLEMS:]
