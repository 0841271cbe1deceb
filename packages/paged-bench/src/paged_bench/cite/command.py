"""`paged-bench record`: check, history, table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paged_bench.cite.table import table
from paged_bench.plain import plain
from paged_bench.record import load, marked_history, save, stale_kernels


def check(files: Sequence[Path]) -> int:
    """Print one line a record.

    Returns:
        0, or 1 when one is of other kernels and not marked as history.

    Raises:
        RecordError: a record is refused.
        OSError: a record cannot be read.
    """
    stale = False
    for path in files:
        record = load(path)
        changed = stale_kernels(record)
        if record.history is not None:
            state = f"history since {record.history.since}: {record.history.because}"
        elif changed:
            state, stale = f"STALE: {', '.join(changed)} changed since it was measured", True
        else:
            state = "present"
        print(f"{path.name}: {len(record.cases)} cases, {record.created[:10]}, {plain(state)}")
    return int(stale)


def mark(path: Path, because: str) -> int:
    """Mark a record as history, in place.

    Raises:
        RecordError: it is refused, or history already.
        OSError: it cannot be read or written.
    """
    save(marked_history(load(path), because), path)
    print(f"{path.name} is history now")
    return 0


def show(path: Path, only: str) -> int:
    """Print the table of a record.

    Raises:
        RecordError: it is refused, or has no such case.
        OSError: it cannot be read.
    """
    print(table(load(path), only))
    return 0
