"""Ways to attend, and the choice between them.

`PATHS` is in order of preference. The baseline refuses nothing that the operator accepts and stands last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_cuda._driver import DeviceProperties
from paged_cuda.bounds import Bounds
from paged_cuda.errors import ArgumentMismatch
from paged_cuda.launch_plan import AttendPath, LaunchSpec, PathOptions, PathPlan, StepPlan
from paged_cuda.signature import append_signature, baseline_signature
from paged_cuda.sm90_path import HopperPath
from paged_cuda.split_path import SplitPath

if TYPE_CHECKING:
    from paged_schema import Call


@dataclass(frozen=True, slots=True)
class BaselinePath:
    """One block a (token, head), float32 throughout: complete, slow, the judge of the faster paths."""

    name: str = "baseline"

    THREADS = 256
    KEY_TILE = 64
    BLOCKS_PER_MULTIPROCESSOR = 8

    def refuses(self, call: Call, properties: DeviceProperties, options: PathOptions) -> str | None:
        """Return why not: rows that do not fit the GPU's shared memory, or an option it does not have."""
        if options.row_tile is not None:
            return "has no row tiles to choose"
        needed = self.shared_bytes(call)
        if needed <= properties.shared_bytes:
            return None
        return f"needs {needed} bytes of shared memory a block, the GPU has {properties.shared_bytes}"

    def yields(self, call: Call, bounds: Bounds, options: PathOptions) -> None:
        """Return None: nothing is measured to be faster than this among the paths after it."""

    def shared_bytes(self, call: Call) -> int:
        """Return the offsets and weights of a key tile, a query row and an accumulator, in bytes."""
        return self.KEY_TILE * (8 + 4) + 4 * ((call.head_size or 0) + (call.v_head_size or 0))

    def plan(
        self, call: Call, bounds: Bounds, properties: DeviceProperties, options: PathOptions
    ) -> PathPlan:
        """Return one launch; it needs no workspace, and no split: its sums never depend on the batch."""
        blocks = min(
            bounds.max_tokens * call.num_heads, properties.multiprocessors * self.BLOCKS_PER_MULTIPROCESSOR
        )
        signature = baseline_signature(call, debug=options.debug)
        return PathPlan(
            (LaunchSpec(signature, (blocks, 1, 1), (self.THREADS, 1, 1), self.shared_bytes(call)),)
        )


PATHS: tuple[AttendPath, ...] = (HopperPath(), SplitPath(), BaselinePath())

_DEFAULT_OPTIONS = PathOptions()
_APPEND_THREADS = 128
_APPEND_PART = 8 * _APPEND_THREADS  # rotary channels of a query that a block takes at a time


def _append_launch(
    call: Call, bounds: Bounds, properties: DeviceProperties, attend: PathPlan, *, debug: bool
) -> LaunchSpec:
    parts = 1
    if attend.workspace.nbytes_of("query_rotary"):
        parts += -(-call.num_heads * attend.constants["query_width"] // _APPEND_PART)
    blocks = min(bounds.max_tokens * parts, properties.multiprocessors * 16)
    return LaunchSpec(append_signature(call, debug=debug), (blocks, 1, 1), (_APPEND_THREADS, 1, 1))


def choose_path(
    call: Call,
    bounds: Bounds,
    properties: DeviceProperties,
    *,
    kernel: str = "auto",
    options: PathOptions = _DEFAULT_OPTIONS,
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
        refusal = path.refuses(call, properties, options)
        if refusal is None and kernel == "auto":
            refusal = path.yields(call, bounds, options)
        if refusal is not None:
            refusals.append(f"{path.name}: {refusal}")
            continue
        attend = path.plan(call, bounds, properties, options)
        reason = "asked for by name" if kernel != "auto" else "; ".join(refusals) or "first choice"
        append = _append_launch(call, bounds, properties, attend, debug=options.debug)
        return StepPlan(path.name, reason, append, attend)
    raise ArgumentMismatch("kernel", "kernel", kernel, f"a call that it serves ({'; '.join(refusals)})")
