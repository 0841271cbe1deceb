"""`paged-bench report`: every picture as SVG in two widths, and one page that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from paged_bench.errors import RecordError
from paged_bench.record import Record, load
from paged_bench.report.data import OURS, points
from paged_bench.report.growth import growth
from paged_bench.report.heat import heat_map
from paged_bench.report.latency import latency
from paged_bench.report.page import document, figure
from paged_bench.report.roofline import roofline
from paged_bench.report.split import step_split
from paged_bench.report.svg import escape

WIDE, NARROW = 760, 340
Draw: TypeAlias = Callable[[Sequence[Record], int], str | None]

PICTURES: dict[str, tuple[Draw, str]] = {
    "roofline": (
        roofline,
        "Every case but prefill. Peers stand a little to the right of their place, to be seen.",
    ),
    "latency-context": (partial(latency, over="context"), "One sequence, 576/512, one new token."),
    "latency-batch": (
        partial(latency, over="batch"),
        "Sequences of 4,096 tokens, 576/512, one new token each.",
    ),
    "ratio-to-floor": (
        heat_map,
        "An empty cell was not measured, or that implementation has no kernel for it.",
    ),
    "growth": (
        growth,
        "A step of the page authority costs what it touches; attention reads the whole context.",
    ),
    "step": (step_split, "Kernels timed apart need not add up to the step, which is launched together."),
}


def run(files: Sequence[Path], out: Path) -> int:
    """Draw the records into the folder `out`.

    Raises:
        RecordError: a record is refused, or none has anything to draw.
        OSError: a file cannot be read or written.
    """
    written = write([load(path) for path in files], out, [path.name for path in files])
    print(f"{len(written)} files in {out}")
    return 0


def write(records: Sequence[Record], out: Path, names: Sequence[str]) -> list[Path]:
    """Write `report.html` and the SVG files, and return what was written.

    Raises:
        RecordError: no record has anything to draw, or they are of different GPUs.
        OSError: a file cannot be written.
    """
    _same_gpu(records)
    drawn = {name: (draw(records, WIDE), draw(records, NARROW)) for name, (draw, _) in PICTURES.items()}
    texts: dict[str, str] = {}
    figures = []
    for name, (wide, narrow) in drawn.items():
        if wide is None or narrow is None:
            continue
        texts |= {f"{name}.svg": wide, f"{name}-narrow.svg": narrow}
        figures.append(figure(wide, narrow, PICTURES[name][1]))
    if not texts:
        raise RecordError("records", "hold nothing that could be drawn", "give records of a suite")
    body = ["<h1>Measurements</h1>", f"<p>{_ages(records)}</p>", *figures, _sources(records, names)]
    texts["report.html"] = document("Measurements", "\n".join(body))
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
    return [out / name for name in texts]


def _same_gpu(records: Sequence[Record]) -> None:
    """Refuse what one line under one name would mix.

    Raises:
        RecordError: Cases with a shape were measured on different GPUs.
    """
    shaped = [record for record in records if any(case.shape for case in record.cases)]
    names = sorted({record.environment.gpu.name for record in shaped if record.environment.gpu})
    if len(names) > 1:
        raise RecordError("records", f"are of different GPUs: {', '.join(names)}", "draw each by itself")


def _ages(records: Sequence[Record]) -> str:
    """Say which figures are of earlier sources."""
    found = points(records)
    lines = ["Each ratio is to the ceilings of its own run; the records are named below."]
    if any(point.history for point in found if point.implementation != OURS):
        lines.insert(0, "The peers were measured in another run than our kernels.")
    if any(point.history for point in found if point.implementation == OURS):
        lines.insert(0, "Our own figures are those of earlier kernels.")
    return " ".join(lines)


def _sources(records: Sequence[Record], names: Sequence[str]) -> str:
    lines = []
    for name, record in zip(names, records, strict=True):
        gpu = record.environment.gpu
        machine = gpu.name if gpu else record.environment.cpu
        history = f" <strong>History:</strong> {escape(record.history.because)}." if record.history else ""
        what = f"{escape(record.what)} {escape(machine)}, {record.created[:10]}."
        lines.append(f"<li><code>{escape(name)}</code>: {what}{history}</li>")
    return f"<h2>Records</h2>\n<ul>{''.join(lines)}</ul>"
