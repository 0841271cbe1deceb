"""The report for a terminal: plain lines, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_bench.residency.results import CrossingResult, FloorResult, LaneResult, Report

MIB = 1 << 20


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows under a head: words to the left, numbers with separators to the right."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    numeric = [all(_is_number(row[column]) for row in cells[1:]) for column in range(len(head))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(
            word.rjust(width) if right else word.ljust(width)
            for word, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:]])


def render(report: Report) -> str:
    """The whole report."""
    lengths = {len(lane.token_ids) for lane in report.lanes}
    parts = [
        f"{report.model} on {report.backend} ({report.device}), granules of {report.granularity} bytes",
        f"{report.prompt!r} continued by {max(lengths)} tokens in {len(report.lanes)} caches side by side: "
        + ("the same tokens in all" if report.same_tokens else "THE TOKENS DIFFER"),
        f"  {report.text!r}",
    ]
    for shape in dict.fromkeys(lane.shape for lane in report.lanes):
        lanes = [lane for lane in report.lanes if lane.shape == shape]
        parts += [f"\n{shape}: memory", _memory(lanes), f"\n{shape}: growth", _growth(lanes)]
    parts += ["\nplaces of the bindings", _placements(report), "\ngranules by live tokens", _floors(report)]
    if report.crossing:
        parts += [
            f"\n{report.crossing_shape}: growth across granules",
            growth_table(report.crossing),
        ]
    return "\n".join(parts) + "\n"


def _memory(lanes: Sequence[LaneResult]) -> str:
    head = ("cache", "graph", "from", "attributed B", "physical B", "billed B")
    return table(
        head,
        (
            (
                lane.label,
                "on" if lane.capture else "off",
                lane.min_bucket,
                lane.attributed_bytes,
                lane.physical_bytes,
                lane.billed_bytes,
            )
            for lane in lanes
        ),
    )


def _growth(lanes: Sequence[LaneResult]) -> str:
    head = (
        "cache",
        "graph",
        "from",
        "growths",
        "moved B",
        "copied B",
        "captures/replays/invalidations/keeps",
    )
    return table(
        head,
        (
            (
                lane.label,
                "on" if lane.capture else "off",
                lane.min_bucket,
                lane.growth_events,
                lane.kv_bytes_moved,
                lane.actual_copy_bytes,
                "/".join(map(str, lane.counters)),
            )
            for lane in lanes
        ),
    )


def _placements(report: Report) -> str:
    return table(
        ("shape", "placement", "tokens", "rows B", "attributed B", "physical B"),
        (
            (
                row.shape,
                row.placement,
                row.tokens,
                row.logical_bytes,
                row.attributed_bytes,
                row.physical_bytes,
            )
            for row in report.placements
        ),
    )


def _floors(report: Report) -> str:
    shown = (1, 128, 512, 1_024, 8_192, 32_768)

    def row(floor: FloorResult) -> list[object]:
        granules = dict(zip(floor.tokens, floor.granules, strict=True))
        return [floor.shape, floor.layout, *(granules.get(tokens, "-") for tokens in shown)]

    return table(("shape", "layout", *(f"{tokens:,}" for tokens in shown)), map(row, report.floors))


def growth_table(stages: Sequence[CrossingResult]) -> str:
    """Growth across granules, length by length."""
    words = {True: "equal", False: "DIFFER", None: "-"}
    head = (
        *("cache", "tokens", "granules", "planned B", "driver B"),
        *("copied B", "captures", "keeps", "bits"),
    )
    return table(
        head,
        (
            (
                stage.label,
                stage.tokens,
                stage.granules_a_binding,
                stage.planned_bytes,
                stage.driver_bytes,
                stage.bytes_moved,
                stage.captures,
                stage.growth_keeps,
                words[stage.equal_bits],
            )
            for stage in stages
        ),
    )


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(",", "").isdigit()
