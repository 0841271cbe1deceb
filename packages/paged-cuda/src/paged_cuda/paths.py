"""Ways to attend: which kernels run, over which grid, with how much workspace.

A path looks at the call, the bounds and the GPU, never at lengths. `PATHS` is in order of preference, and
the baseline, which refuses nothing, stands last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paged_cuda._driver import DeviceProperties, Dim
from paged_cuda.bounds import Bounds
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.signature import KernelSignature, append_signature, baseline_signature
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
    """

    signature: KernelSignature
    grid: Dim
    block: Dim
    shared_bytes: int = 0
    programmatic: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All launches of one step, in order, and the scratch memory they share.

    Attributes:
        path: Name of the way to attend.
        reason: Why this one.
        launches: Append first, then the path's own.
        workspace: Regions of scratch memory.
    """

    path: str
    reason: str
    launches: tuple[LaunchSpec, ...]
    workspace: WorkspaceLayout = field(default_factory=WorkspaceLayout)


class AttendPath(Protocol):
    """A way to attend."""

    @property
    def name(self) -> str:
        """What `kernel=` calls it."""
        ...

    def refuses(self, call: Call, properties: DeviceProperties) -> str | None:
        """Return why this path cannot serve the call on that GPU, or None."""
        ...

    def plan(
        self, call: Call, bounds: Bounds, properties: DeviceProperties, *, debug: bool
    ) -> tuple[tuple[LaunchSpec, ...], WorkspaceLayout]:
        """Return the launches after append, and the workspace."""
        ...


@dataclass(frozen=True, slots=True)
class BaselinePath:
    """One block a (token, head), float32 throughout: complete, slow, the judge of the faster paths."""

    name: str = "baseline"

    THREADS = 256
    KEY_TILE = 64
    BLOCKS_PER_MULTIPROCESSOR = 8

    def refuses(self, call: Call, properties: DeviceProperties) -> str | None:
        """Return why not: only rows that do not fit the GPU's shared memory."""
        needed = self.shared_bytes(call)
        if needed <= properties.shared_bytes:
            return None
        return f"needs {needed} bytes of shared memory a block, the GPU has {properties.shared_bytes}"

    def shared_bytes(self, call: Call) -> int:
        """Return the offsets and weights of a key tile, a query row and an accumulator, in bytes."""
        return self.KEY_TILE * (8 + 4) + 4 * ((call.head_size or 0) + (call.v_head_size or 0))

    def plan(
        self, call: Call, bounds: Bounds, properties: DeviceProperties, *, debug: bool
    ) -> tuple[tuple[LaunchSpec, ...], WorkspaceLayout]:
        """Return one launch; it needs no workspace."""
        blocks = min(
            bounds.max_tokens * call.num_heads, properties.multiprocessors * self.BLOCKS_PER_MULTIPROCESSOR
        )
        signature = baseline_signature(call, debug=debug)
        return (
            LaunchSpec(signature, (blocks, 1, 1), (self.THREADS, 1, 1), self.shared_bytes(call)),
        ), WorkspaceLayout()


PATHS: tuple[AttendPath, ...] = (BaselinePath(),)


def _append_launch(call: Call, bounds: Bounds, properties: DeviceProperties, debug: bool) -> LaunchSpec:
    blocks = min(bounds.max_tokens, properties.multiprocessors * 16)
    return LaunchSpec(append_signature(call, debug=debug), (blocks, 1, 1), (128, 1, 1))


def choose_path(
    call: Call, bounds: Bounds, properties: DeviceProperties, *, kernel: str = "auto", debug: bool = False
) -> StepPlan:
    """Return the launches for `call`: the first path that does not refuse, or the one that `kernel` names.

    Raises:
        ArgumentMismatch: No path has that name, or the path named refuses.
    """
    names = [path.name for path in PATHS]
    if kernel not in ("auto", *names):
        raise ArgumentMismatch("kernel", "kernel", kernel, f"one of auto, {', '.join(names)}")
    refusals: list[str] = []
    for path in PATHS:
        if kernel not in ("auto", path.name):
            continue
        refusal = path.refuses(call, properties)
        if refusal is not None:
            refusals.append(f"{path.name}: {refusal}")
            continue
        launches, workspace = path.plan(call, bounds, properties, debug=debug)
        reason = "asked for by name" if kernel != "auto" else "; ".join(refusals) or "first choice"
        return StepPlan(
            path.name, reason, (_append_launch(call, bounds, properties, debug), *launches), workspace
        )
    raise ArgumentMismatch("kernel", "kernel", kernel, f"a call that it serves ({'; '.join(refusals)})")
