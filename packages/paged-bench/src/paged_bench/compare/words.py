"""Figures and headlines as all outputs write them."""

from __future__ import annotations

from paged_bench.compare.comparison import Comparison, Unmatched
from paged_bench.compare.verdict import Row, Verdict
from paged_bench.plain import plain


def time_text(us: float) -> str:
    """Return a time in the unit that fits.

    Example:
        >>> time_text(0.25), time_text(49.694), time_text(2060), time_text(1.2e6)
        ('250.0 ns', '49.69 µs', '2.06 ms', '1.20 s')
    """
    if us < 1:
        return f"{us * 1e3:.1f} ns"
    if us < 1e3:
        return f"{us:.2f} µs"
    return f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def change_text(row: Row) -> str:
    """Return the change of the medians, signed, positive is slower."""
    return f"{row.change:+.1%}"


def interval_text(row: Row) -> str:
    """Return the interval of the change, or nothing where there is none."""
    return "" if row.ratio is None else f"{row.ratio.low - 1:+.1%} … {row.ratio.high - 1:+.1%}"


def series_name(title: str, what: str, timing: str) -> str:
    """Return title and series as one name; the only series of a CPU case goes without saying.

    Example:
        >>> series_name("a case", "step", "eager"), series_name("a case", "call", "wall")
        ('a case · step, eager', 'a case')
    """
    title, what = plain(title), plain(what)
    if not what or (what, timing) == ("call", "wall"):
        return title
    return title + f" · {what}" + (f", {timing}" if timing != "graph" else "")


def name_text(row: Row | Unmatched) -> str:
    """Return title and series of a row as one name."""
    return series_name(row.title, row.what, row.timing)


def headline(comparison: Comparison) -> str:
    """Say the outcome in one line."""
    counts = [(verdict, comparison.count(verdict)) for verdict in Verdict]
    parts = [f"{number} {verdict.word}" for verdict, number in counts if number]
    if comparison.broken:
        parts.insert(0, f"{len(comparison.broken)} no longer run")
    for state in ("fails in both", "failed before", "new", "removed"):
        number = sum(one.state == state for one in comparison.unmatched)
        parts += [f"{number} {state}"] if number else []
    return ", ".join(parts)


def side_text(comparison: Comparison, side: str) -> str:
    """Name one side: its commit where known, else when it was measured."""
    record = comparison.base if side == "base" else comparison.head
    dirty = " with changes" if record.revision and record.revision.dirty else ""
    named = f"commit {record.revision.commit[:12]}{dirty}, " if record.revision else ""
    history = ", history" if record.history else ""
    return f"{named}measured {record.created[:16].replace('T', ' ')} UTC{history}"


def machine_lines(comparison: Comparison) -> list[tuple[str, str]]:
    """Describe the machine of the head, one fact a line."""
    environment = comparison.head.environment
    gpu = environment.gpu
    lines = [("GPU", f"{gpu.name}, {gpu.multiprocessors} multiprocessors")] if gpu else []
    if gpu:
        lines.append(("driver", f"{gpu.driver_release or gpu.driver}, NVRTC {gpu.nvrtc or 'not stated'}"))
    lines += [
        ("processor", environment.cpu),
        ("cores", str(environment.cores)),
        ("system", environment.system),
    ]
    lines.append(("Python", environment.python))
    if environment.load is not None:
        lines.append(("load", f"{environment.load[0]} before, {environment.load[1]} after"))
    return lines
