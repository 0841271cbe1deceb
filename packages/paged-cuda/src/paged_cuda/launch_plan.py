"""What a way to attend promises: its launches, their grids, and the scratch memory they share.

All of it comes from the call, the bounds and the GPU, never from lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paged_cuda._driver import DeviceProperties, Dim
from paged_cuda.bounds import INT32_MAX, Bounds
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.signature import KernelSignature
from paged_cuda.tensor_maps import MapPlan
from paged_cuda.workspace import WorkspaceLayout

if TYPE_CHECKING:
    from paged_schema import Call


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One launch of a step.

    Attributes:
        signature: The kernel.
        grid: Blocks, from bounds and the GPU.
        block: Threads.
        shared_bytes: Dynamic shared memory a block.
        programmatic: Whether it may start before its predecessor ends; the kernel then waits by itself.
        schedule: Whether it writes the schedule, which steps with the same lengths may share.
        maps: What its second argument tells the copy engine; None: it has no second argument.
    """

    signature: KernelSignature
    grid: Dim
    block: Dim
    shared_bytes: int = 0
    programmatic: bool = False
    schedule: bool = False
    maps: MapPlan | None = None


@dataclass(frozen=True, slots=True)
class PathOptions:
    """What a caller may fix beside the path.

    Attributes:
        row_tile: Packed query rows of a block; None: chosen.
        split_rows: KV rows of a part, which makes results independent of the batch; 0: equal slices.
        weight_terms: 16-bit terms of a softmax weight, 1 or 2; None: the path's own choice.
        debug: Whether the kernels count violations.

    Raises:
        ArgumentMismatch: A number of the wrong kind or range.
    """

    row_tile: int | None = None
    split_rows: int = 0
    weight_terms: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        rows = self.row_tile
        for name, got, holds, wanted in (
            ("row_tile", rows, rows is None or _is_integer(rows), "None or an integer"),
            (
                "split_rows",
                self.split_rows,
                _is_integer(self.split_rows) and 0 <= self.split_rows <= INT32_MAX,
                f"an integer from 0 to {INT32_MAX}",
            ),
            ("weight_terms", self.weight_terms, self.weight_terms in (None, 1, 2), "None, 1 or 2"),
        ):
            if not holds:
                raise ArgumentMismatch(name, name, repr(got), wanted)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class PathPlan:
    """A path's own part of a step.

    Attributes:
        launches: After append, in order.
        workspace: Regions of scratch memory, each named after the pointer in `AttentionParams` that gets its
            address.
        constants: Further fields of `AttentionParams` that the bounds fix.
        description: The tiles, in words.
    """

    launches: tuple[LaunchSpec, ...]
    workspace: WorkspaceLayout = field(default_factory=WorkspaceLayout)
    constants: Mapping[str, int] = field(default_factory=dict)
    description: str = ""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All of one step.

    Attributes:
        path: Name of the way to attend.
        reason: Why this one.
        append: The launch that writes the cache.
        attend: The path's part.
    """

    path: str
    reason: str
    append: LaunchSpec
    attend: PathPlan

    @property
    def launches(self) -> tuple[LaunchSpec, ...]:
        """All launches in order."""
        return (self.append, *self.attend.launches)


class AttendPath(Protocol):
    """A way to attend."""

    @property
    def name(self) -> str:
        """What `kernel=` calls it."""
        ...

    def refuses(self, call: Call, properties: DeviceProperties, options: PathOptions) -> str | None:
        """Return why this path cannot serve the call on that GPU, or None."""
        ...

    def yields(self, call: Call, bounds: Bounds, options: PathOptions) -> str | None:
        """Return why another path is measured to be faster, or None."""
        ...

    def plan(
        self, call: Call, bounds: Bounds, properties: DeviceProperties, options: PathOptions
    ) -> PathPlan:
        """Return the launches after append, the workspace and the constants."""
        ...
