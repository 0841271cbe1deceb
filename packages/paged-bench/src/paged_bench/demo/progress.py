"""The run as people watch it: one line a sequence, its text as it comes.

On a terminal the table is redrawn in place. Elsewhere a line is printed when a sequence ends, so that a
log stays readable. Nothing here changes the run.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from paged_bench.demo.requests import Sequence
from paged_bench.demo.scheduler import StepRecord
from paged_bench.demo.tokenizer import TextCodec

_STATE_STYLE = {"waiting": "dim", "prefill": "yellow", "decode": "cyan", "done": "green"}


class Progress:
    """Shows sequences while they are decoded; a context manager.

    Args:
        console: Where to draw.
        sequences: All sequences of the run, in the order of the prompts.
        codec: Decodes the token ids.
    """

    def __init__(self, console: Console, sequences: Ordered[Sequence], codec: TextCodec) -> None:
        self._console = console
        self._sequences = sequences
        self._codec = codec
        self._reported: set[int] = set()
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, record: StepRecord) -> None:
        """Show the state after a step."""
        if self._live is not None:
            self._live.update(self._table(record), refresh=True)
        for sequence in self._sequences:
            if sequence.finished and sequence.request.index not in self._reported:
                self._reported.add(sequence.request.index)
                self._console.print(self._line(record, sequence), soft_wrap=True)

    def _line(self, record: StepRecord, sequence: Sequence) -> str:
        count = len(sequence.new_ids)
        head = f"[dim]step {record.step:>3}[/]  [green]#{sequence.request.index + 1}[/] {count:>3} tokens"
        prompt, text = _flat(sequence.request.text, 48), _flat(self._text(sequence), 400)
        return f"{head}  {escape(prompt)}[bold]{escape(text)}[/]"

    def _table(self, record: StepRecord) -> Table:
        title = f"step {record.step}: {record.running} running, {record.waiting} waiting"
        table = Table(title=title, title_justify="left", expand=True, box=None)
        table.add_column("#", width=4)
        table.add_column("state", width=8)
        table.add_column("tokens", width=6)
        table.add_column("text", ratio=1, no_wrap=True)
        width = max(20, self._console.width - 28)
        for sequence in self._sequences:
            if sequence.finished:
                continue
            style = _STATE_STYLE[sequence.state]
            text = _flat(sequence.request.text + self._text(sequence), width, keep_end=True)
            table.add_row(
                str(sequence.request.index + 1),
                f"[{style}]{sequence.state}[/]",
                str(len(sequence.new_ids)),
                escape(text),
            )
        return table

    def _text(self, sequence: Sequence) -> str:
        # An unfinished character shows as the replacement character until its last byte has come.
        return self._codec.decode(sequence.new_ids).rstrip("\ufffd")


def _flat(text: str, width: int, *, keep_end: bool = False) -> str:
    """One line of at most `width` characters, cut at the start or at the end."""
    flat = text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    flat = "".join(char if char.isprintable() else "\ufffd" for char in flat)
    if len(flat) <= width:
        return flat
    return "…" + flat[-(width - 1) :] if keep_end else flat[: width - 1] + "…"
