"""The run as people watch it: one line a case when it is done, and above it what is being done."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from paged_bench.record import Case, Ceiling, Record


class Progress:
    """Shows a run; a context manager. Nothing here changes the run.

    Args:
        console: Where to draw.
        total: Cases of all rounds.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._started = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)
        self._title = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, title: str) -> None:
        """Name the case that begins."""
        self._title = title
        self.show("")

    def show(self, doing: str) -> None:
        """Say what is being done."""
        text = f"{self._title}: {doing}" if self._title and doing else self._title or doing
        self._bar.update(self._task, description=escape(text))

    def done(self) -> None:
        """Count a case of a round."""
        self._bar.advance(self._task)

    def line(self, text: str) -> None:
        """Print a line that stays."""
        seconds = time.monotonic() - self._started
        self._console.print(f"[dim]{seconds:6.1f} s[/]  {text}", soft_wrap=True)


_UNITS = {"matmul": ("TFLOP/s", 1e12), "launch": ("us", 1.0)}


def ceiling_line(ceiling: Ceiling) -> str:
    """Return a ceiling's line."""
    unit, scale = _UNITS.get(ceiling.what, ("GB/s", 1e9))
    name = f"{ceiling.what} {ceiling.dtype}" if ceiling.dtype else ceiling.what
    return f"{name}: [bold]{ceiling.value / scale:.4g}[/] {unit}  [dim]{escape(ceiling.method)}[/]"


def case_lines(record: Record, case: Case) -> list[str]:
    """Return a case's lines: its time and what it is of the floor, then its peers."""
    if case.failed is not None:
        return [f"[red]{escape(case.title)}: {escape(case.failed)}[/]"]
    main, ratio = case.samples(timing="graph") or case.samples(), record.ratio_to_floor(case)
    if main is None:
        return [escape(case.title)]
    text = f"{escape(case.title):<44} [bold]{main.median:9.1f}[/] us"
    if ratio is not None and case.work is not None:
        text += f"  {ratio:6.2f} x floor"
        text += f"  {case.work.bytes / main.median / 1e3:6.0f} GB/s"
        text += f"  {case.work.operations / main.median / 1e6:5.0f} TFLOP/s"
    step = case.samples("step", "graph")
    if step is not None and step is not main:
        text += f"  step {step.median:.1f} us"
    lines = [text]
    for row in case.peers:
        samples = row.series[0] if row.series else None
        told = f"{samples.median:9.1f} us" if samples else f"[dim]{escape(row.failed or '')}[/]"
        lines.append(f"    {escape(row.peer):<40} {told}")
    return lines
