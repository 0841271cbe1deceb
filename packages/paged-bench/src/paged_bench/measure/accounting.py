"""What the operator does to the driver and to memory while it runs: it must allocate and wait for nothing."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from paged_cuda._driver import Driver

ALLOCATIONS = ("allocate", "allocate_pinned", "free", "free_pinned")
WAITS = ("synchronize", "wait_event", "copy_to_host")


class CallCounter:
    """Counts a driver's allocations and waits while the block runs; no garbage is collected meanwhile.

    Attributes:
        calls: How often each was called.
    """

    def __init__(self, driver: Driver) -> None:
        self.calls: Counter[str] = Counter()
        self._driver = driver

    def __enter__(self) -> Self:
        self._collected = gc.isenabled()
        gc.disable()  # what it frees would count
        for name in (*ALLOCATIONS, *WAITS):
            setattr(self._driver, name, self._counted(name, getattr(self._driver, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*ALLOCATIONS, *WAITS):
            delattr(self._driver, name)  # the class's own method shows again
        if self._collected:
            gc.enable()

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            self.calls[name] += 1
            return method(*arguments)

        return call

    @property
    def allocations(self) -> int:
        """Allocations and frees, of the device and of pinned memory."""
        return sum(self.calls[name] for name in ALLOCATIONS)

    @property
    def waits(self) -> int:
        """Calls that wait for the GPU."""
        return sum(self.calls[name] for name in WAITS)
