"""What the report states, as plain data: every figure comes out of a run or out of the planner."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

FORMAT = 1


@dataclass(frozen=True)
class StepResult:
    """One step of a decode.

    Attributes:
        length: Tokens in the cache after it.
        capacity: Tokens that the cache could hold.
        access: `launch`, `capture` or `replay`.
        billed_bytes: Memory that was asked for before it.
        grown: Whether the capacity grew before it.
        invalidated: Whether that cost the graph.
    """

    length: int
    capacity: int
    access: str
    billed_bytes: int
    grown: bool
    invalidated: bool


@dataclass(frozen=True)
class LaneResult:
    """A whole decode in one variant of a cache.

    Attributes:
        shape: The model whose cache it is.
        label: The variant in words.
        layout: The layout's name.
        in_place: Whether it grows behind reserved addresses.
        capture: Whether decode steps were graphs.
        min_bucket: The smallest capacity, in tokens.
        attributed_bytes: Granules that each binding touches, added up; for a reallocated cache its buffers.
        physical_bytes: Memory behind the cache at the end, every granule once.
        billed_bytes: Memory that was asked of the governor for it.
        growth_events: Growths after the first allocation.
        kv_bytes_moved: Bytes moved by the usual formula: all rows, and a mask of 8 bytes a token.
        actual_copy_bytes: Bytes that were copied.
        captures: Graphs captured.
        replays: Steps served by a replay.
        invalidations: Times that a graph, or the state for one, was given up.
        growth_keeps: Growths that kept it.
        token_ids: The decoded tokens.
        steps: Every step, the prefill first.
    """

    shape: str
    label: str
    layout: str
    in_place: bool
    capture: bool
    min_bucket: int
    attributed_bytes: int
    physical_bytes: int
    billed_bytes: int
    growth_events: int
    kv_bytes_moved: int
    actual_copy_bytes: int
    captures: int
    replays: int
    invalidations: int
    growth_keeps: int
    token_ids: tuple[int, ...]
    steps: tuple[StepResult, ...]

    @property
    def counters(self) -> tuple[int, int, int, int]:
        """Captures, replays, invalidations, keeps."""
        return self.captures, self.replays, self.invalidations, self.growth_keeps


@dataclass(frozen=True)
class FloorResult:
    """How the memory of a layout follows the tokens, by the planner.

    Attributes:
        shape: The model.
        layout: The layout's name.
        tokens: Live tokens.
        granules: Granules that they need.
    """

    shape: str
    layout: str
    tokens: tuple[int, ...]
    granules: tuple[int, ...]


@dataclass(frozen=True)
class PlacementResult:
    """The memory of one sequence by the place of its bindings, by the planner.

    Attributes:
        shape: The model.
        placement: `granule_aligned` or `packed`.
        tokens: Live tokens.
        logical_bytes: Bytes of their rows.
        attributed_bytes: Granules that each binding touches, added up.
        physical_bytes: Every granule once.
    """

    shape: str
    placement: str
    tokens: int
    logical_bytes: int
    attributed_bytes: int
    physical_bytes: int


@dataclass(frozen=True)
class CrossingResult:
    """One length of a cache that grows across granules.

    Attributes:
        label: How the cache is held.
        layout: The layout's name.
        tokens: Tokens in the cache.
        granules_a_binding: Granules behind each binding.
        planned_bytes: What the planner says is mapped.
        driver_bytes: What the driver says is mapped.
        bytes_moved: Bytes copied by the growth.
        captures: Graphs captured so far.
        replays: Replays so far.
        growth_keeps: Growths so far that kept the graph.
        equal_bits: Whether the replay's output equals that of a launch over a fresh allocation with the same
            rows, bit for bit; None where no kernel runs.
    """

    label: str
    layout: str
    tokens: int
    granules_a_binding: int
    planned_bytes: int
    driver_bytes: int
    bytes_moved: int
    captures: int
    replays: int
    growth_keeps: int
    equal_bits: bool | None


@dataclass(frozen=True)
class Report:
    """The whole report.

    Attributes:
        backend: `fake` or `cuda`.
        device: What it ran on, for people.
        model: The file that was decoded.
        prompt: The text that was continued, and `text` what came.
        text: See `prompt`.
        granularity: Bytes of a granule.
        lanes: Decodes, shape after shape.
        floors: Curves of the planner.
        placements: Placements of the planner.
        crossing_shape: The model of `crossing`.
        crossing: Growth across granules.
    """

    backend: str
    device: str
    model: str
    prompt: str
    text: str
    granularity: int
    lanes: tuple[LaneResult, ...]
    floors: tuple[FloorResult, ...]
    placements: tuple[PlacementResult, ...]
    crossing_shape: str
    crossing: tuple[CrossingResult, ...]

    @property
    def same_tokens(self) -> bool:
        """Whether every lane decoded the same."""
        return len({lane.token_ids for lane in self.lanes}) == 1

    def to_json(self) -> str:
        """The report as deterministic JSON."""
        facts = {"format": FORMAT, "same_tokens": self.same_tokens, **asdict(self)}
        return json.dumps(facts, indent=1, sort_keys=True)
