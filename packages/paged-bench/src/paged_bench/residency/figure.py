"""The report as one picture: memory, the decode step by step, the layouts' floors, growth under one graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from paged_bench.residency.drawing import Canvas
from paged_bench.residency.results import CrossingResult, FloorResult, LaneResult, PlacementResult, Report

WIDTH, LEFT, RIGHT = 960, 310, 110
_ROW = 22
_DASHES = {"head_major": "", "seq_major": "8 4", "token_major": "2 4"}
_KINDS = {"head_major": "two", "seq_major": "one", "token_major": "three"}
_WORDS = {"head_major": "head-major", "seq_major": "sequence-major", "token_major": "token-major"}


def figure(report: Report) -> str:
    """Draw the whole report; the bytes depend on it alone."""
    canvas = Canvas(WIDTH, "Memory and growth of key-value caches by layout")
    y = 28.0
    for shape in dict.fromkeys(lane.shape for lane in report.lanes):
        y = _memory(canvas, y, shape, [lane for lane in report.lanes if lane.shape == shape])
    first = report.lanes[0].shape
    y = _steps(canvas, y, first, [lane for lane in report.lanes if lane.shape == first])
    y = _placements(canvas, y, report.placements)
    for shape in dict.fromkeys(floor.shape for floor in report.floors):
        y = _floors(canvas, y, [floor for floor in report.floors if floor.shape == shape])
    if report.crossing:
        y = _crossing(canvas, y, report.crossing_shape, report.crossing)
    return canvas.render(y)


def _memory(canvas: Canvas, y: float, shape: str, lanes: Sequence[LaneResult]) -> float:
    length = lanes[0].steps[-1].length
    canvas.text(16, y, f"{shape}: memory of one sequence of {length} tokens", kind="title")
    note = "bar: physical; outline: attributed, what the bindings touch, added up"
    canvas.text(16, y + 16, note, kind="note")
    y += 30
    shown = {(lane.label, lane.min_bucket): lane for lane in lanes}
    widest = max(lane.attributed_bytes for lane in lanes)
    scale = (WIDTH - LEFT - RIGHT - 40) / widest
    for (label, bucket), lane in shown.items():
        canvas.text(LEFT - 10, y + 12, f"{label}, from {bucket}", anchor="end")
        canvas.rect(LEFT, y + 2, max(1.0, lane.attributed_bytes * scale), 13, "open")
        canvas.rect(LEFT, y + 4, max(1.0, lane.physical_bytes * scale), 9, "fill-one")
        canvas.text(LEFT + lane.attributed_bytes * scale + 8, y + 12, f"{lane.physical_bytes:,} B")
        y += _ROW
    return y + 34


def _placements(canvas: Canvas, y: float, rows: Sequence[PlacementResult]) -> float:
    canvas.text(16, y, "Bindings aligned to granules, and packed", kind="title")
    canvas.text(16, y + 16, "bar: physical; outline: attributed; sequence-major", kind="note")
    y += 30
    scale = (WIDTH - LEFT - RIGHT - 40) / max(row.attributed_bytes for row in rows)
    for row in rows:
        words = f"{row.shape}, {row.tokens} tokens, {row.placement.replace('_', ' ')}"
        canvas.text(LEFT - 10, y + 12, words, anchor="end")
        canvas.rect(LEFT, y + 2, row.attributed_bytes * scale, 13, "open")
        canvas.rect(LEFT, y + 4, max(1.0, row.physical_bytes * scale), 9, "fill-one")
        canvas.text(LEFT + row.attributed_bytes * scale + 8, y + 12, f"{row.physical_bytes:,} B")
        y += _ROW
    return y + 34


def _steps(canvas: Canvas, y: float, shape: str, lanes: Sequence[LaneResult]) -> float:
    canvas.text(16, y, f"{shape}: every step of the decode", kind="title")
    note = (
        "stroke: launch; dot: replay; circle: capture; triangle: growth; cross: graph given up; "
        "right: captures/replays/invalidations/keeps"
    )
    canvas.text(16, y + 16, note, kind="note")
    y += 34
    count = len(lanes[0].steps)
    pitch = (WIDTH - LEFT - RIGHT) / count
    for lane in lanes:
        words = f"{lane.label}, {'graph' if lane.capture else 'no graph'}, from {lane.min_bucket}"
        canvas.text(LEFT - 10, y + 4, words, anchor="end")
        for index, step in enumerate(lane.steps):
            x = LEFT + (index + 0.5) * pitch
            if step.access == "capture":
                canvas.circle(x, y, 4, "open")
            elif step.access == "replay":
                canvas.circle(x, y, 1.8, "solid")
            else:
                canvas.line(x, y - 4, x, y + 4, "tick")
            if step.grown:
                canvas.triangle(x, y - 8, 3, "solid")
            if step.invalidated:
                canvas.cross(x, y + 8, 3, "mark")
        canvas.text(WIDTH - RIGHT + 12, y + 4, "/".join(map(str, lane.counters)))
        y += _ROW + 8
    return y + 30


def _floors(canvas: Canvas, y: float, floors: Sequence[FloorResult]) -> float:
    canvas.text(16, y, f"{floors[0].shape}: granules by live tokens, fixed stride", kind="title")
    y += 28
    height, tokens = 190.0, floors[0].tokens
    span = WIDTH - LEFT - RIGHT
    top = max(log2(max(floor.granules)) for floor in floors) or 1.0
    for power in range(0, int(top) + 1, 2):
        at = y + height * (1 - power / top)
        canvas.line(LEFT, at, LEFT + span, at, "grid")
        canvas.text(LEFT - 8, at + 4, f"{1 << power:,}", anchor="end")
    for index, count in enumerate(tokens):
        if index % 3 == 0:
            x = LEFT + span * index / (len(tokens) - 1)
            canvas.text(x, y + height + 18, f"{count:,}", anchor="middle")
    for floor in floors:
        points = [
            (LEFT + span * index / (len(tokens) - 1), y + height * (1 - log2(granules) / top))
            for index, granules in enumerate(floor.granules)
        ]
        canvas.path(points, f"line {_KINDS[floor.layout]}", _DASHES[floor.layout])
    # At the left end the lines lie apart, unless they are one; at the right they meet.
    for start in sorted({floor.granules[0] for floor in floors}):
        words = ", ".join(_WORDS[floor.layout] for floor in floors if floor.granules[0] == start)
        canvas.text(LEFT + 6, y + height * (1 - log2(start) / top) - 6, words)
    return y + height + 56


def _crossing(canvas: Canvas, y: float, shape: str, stages: Sequence[CrossingResult]) -> float:
    canvas.text(16, y, f"{shape}: growth across granules, in place", kind="title")
    canvas.text(16, y + 16, "bar: memory by the driver's count", kind="note")
    y += 36
    scale = (WIDTH - LEFT - RIGHT - 110) / max(stage.driver_bytes for stage in stages)
    for label in dict.fromkeys(stage.label for stage in stages):
        rows = [stage for stage in stages if stage.label == label]
        last, copied = rows[-1], sum(stage.bytes_moved for stage in rows)
        facts = f"{label}: {last.captures} captured, {last.growth_keeps} growths kept it, {copied:,} B copied"
        canvas.text(16, y, facts)
        y += 8
        for stage in rows:
            canvas.text(LEFT - 10, y + 13, f"{stage.tokens:,} tokens", anchor="end")
            canvas.rect(LEFT, y + 3, stage.driver_bytes * scale, 12, "fill-one")
            words = f"{stage.driver_bytes >> 20:,} MiB, {stage.granules_a_binding} a binding"
            canvas.text(LEFT + stage.driver_bytes * scale + 8, y + 13, words)
            y += _ROW
        y += 18
    return y + 10
