"""A request to end, as a service manager or a job's time limit sends it, as an interrupt."""

from __future__ import annotations

import signal
import threading


class Terminable:
    """Makes SIGTERM an interrupt like the one from the keyboard while the block runs."""

    def __enter__(self) -> None:
        self._old = None
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGTERM, self._old)
