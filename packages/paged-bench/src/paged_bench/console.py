"""The console that every command prints on."""

from __future__ import annotations

import os

from rich.console import Console


class PlainConsole(Console):
    """A console that leaves a broken pipe to the command line, as any other output does.

    On standard error it carries no result: without a reader it falls silent and the run goes on.
    """

    def on_broken_pipe(self) -> None:
        """Raise again what rich would turn into exit status 1, or fall silent."""
        if not self.stderr:
            raise BrokenPipeError
        self.quiet = True
        # What is still buffered must find a place to go when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
