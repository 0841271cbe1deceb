"""Registers, shared memory and spills of every compiled variant, as a record and as the table of the docs.

A report is one compilation of all variants: JSON with the digest of the sources and NVRTC's version, so that
a table can be told from a stale one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paged_cuda._nvrtc import nvrtc_version
from paged_cuda.compiler import CompiledKernel
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.sources import sources_digest
from paged_cuda.variants import ARCHITECTURES

_FORMAT = 1
_COLUMNS = ("kernel", "dtype", "constants", "architecture", "registers", "local", "spilled", "shared", "code")
# Constants that follow from the others, or that the table shows elsewhere.
_DERIVED = ("SHARED_BYTES",)


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel for one architecture.

    Attributes:
        kernel: Name of the source.
        dtype: Element type.
        constants: Compile-time constants, `NAME=value` separated by spaces.
        architecture: Such as `sm_90a`.
        registers: Registers a thread.
        local: Stack frame a thread in bytes, spills included.
        spilled: Bytes of spill stores and loads a thread.
        shared: Static and dynamic shared memory a block in bytes; of a kernel whose dynamic part is not
            fixed at compile time only the static one.
        code: Bytes of the cubin.
    """

    kernel: str
    dtype: str
    constants: str
    architecture: str
    registers: int
    local: int
    spilled: int
    shared: int
    code: int

    @classmethod
    def of(cls, kernel: CompiledKernel) -> Row:
        """Return the row of one compilation."""
        signature, used = kernel.signature, kernel.resources
        constants = dict(signature.constants)
        shown = [f"{name}={value}" for name, value in signature.constants if name not in _DERIVED]
        return cls(
            signature.kernel,
            signature.dtype,
            " ".join([*shown, "DEBUG"] if signature.debug else shown),
            kernel.architecture,
            used.registers,
            used.local_bytes,
            used.spill_stores + used.spill_loads,
            used.shared_bytes + constants.get("SHARED_BYTES", 0),
            len(kernel.cubin),
        )


def write_report(kernels: Iterable[CompiledKernel], path: Path) -> None:
    """Write what was compiled to `path`, one kernel a line."""
    rows = [json.dumps([getattr(Row.of(kernel), name) for name in _COLUMNS]) for kernel in kernels]
    head = {
        "format": _FORMAT,
        "command": "python -m paged_cuda compile --all --check --report FILE",
        "nvrtc": "{}.{}".format(*nvrtc_version()),
        "sources_sha256": sources_digest(),
        "columns": _COLUMNS,
    }
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    path.write_text(text, encoding="utf-8")


def read_report(path: Path) -> tuple[Mapping[str, str], list[Row]]:
    """Return the head and the rows of a report.

    Raises:
        ArgumentMismatch: It is no report, or one of another format.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["format"] != _FORMAT or tuple(report["columns"]) != _COLUMNS:
            raise KeyError("format")
        rows = [Row(*row) for row in report.pop("rows")]
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentMismatch("report", str(path), repr(error), f"a report of format {_FORMAT}") from error
    return report, rows


def to_markdown(rows: Iterable[Row]) -> str:
    """Return one table a kernel: a line for each set of constants, a column for each architecture.

    A cell is `registers / shared memory in KB`, the larger of both element types; ` + n` counts the bytes a
    thread spills. An empty cell does not ship.
    """
    cells: dict[str, dict[str, dict[str, list[Row]]]] = {}
    found = set()
    for row in rows:
        line = cells.setdefault(row.kernel, {}).setdefault(row.constants, {})
        line.setdefault(row.architecture, []).append(row)
        found.add(row.architecture)
    architectures = [name for name in ARCHITECTURES if name in found]
    parts = []
    for kernel, lines in cells.items():
        parts += [f"## `{kernel}`", "", "| constants | " + " | ".join(architectures) + " |"]
        parts.append("|---|" + "---|" * len(architectures))
        for constants, line in lines.items():
            shown = [_cell(line.get(name, [])) for name in architectures]
            parts.append(f"| {constants.lower() or '-'} | " + " | ".join(shown) + " |")
        parts.append("")
    return "\n".join(parts)


def _cell(rows: list[Row]) -> str:
    if not rows:
        return ""
    spilled = max(row.spilled for row in rows)
    text = f"{max(row.registers for row in rows)} / {max(row.shared for row in rows) / 1024:.1f}"
    return f"{text} + {spilled}" if spilled else text
