"""What an operator will do, in numbers that can be read before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from paged_cuda._driver import DeviceProperties
from paged_cuda.compiler import architecture_of
from paged_cuda.launch_plan import StepPlan
from paged_cuda.resources import Resources

if TYPE_CHECKING:
    from paged_schema import Call


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One launch of a step.

    Attributes:
        symbol: The kernel.
        grid: Blocks.
        block: Threads a block.
        shared_bytes: Dynamic shared memory a block.
        resources: Registers and local memory; None before `prepare`.
    """

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    resources: Resources | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was chosen for a call, and why. Printing it gives a short text.

    Attributes:
        path: Name of the way to attend.
        reason: Why this one; what faster paths said against the call.
        tiles: How the kernel is tiled; empty for the baseline.
        device: The GPU's name.
        architecture: What the kernels are compiled for.
        workspace_bytes: Scratch memory.
        kernels: The launches, in order.
        floor_bytes: Bytes that the batch given must move at least; None without a batch.
        floor_us: The time that takes at the memory's peak rate; None where either is unknown.
    """

    path: str
    reason: str
    tiles: str
    device: str
    architecture: str
    workspace_bytes: int
    kernels: tuple[KernelReport, ...]
    floor_bytes: int | None = None
    floor_us: float | None = None

    def __str__(self) -> str:
        lines = [
            f"path {self.path} ({self.reason}) on {self.device}, {self.architecture}",
            f"workspace {self.workspace_bytes} bytes",
        ]
        if self.tiles:
            lines.append(self.tiles)
        for kernel in self.kernels:
            used = kernel.resources
            registers = "not compiled yet" if used is None else f"{used.registers} registers"
            lines.append(
                f"  {kernel.symbol}: {prod(kernel.grid)} x {prod(kernel.block)} threads, {registers}, "
                f"{kernel.shared_bytes} bytes shared"
            )
        if self.floor_bytes is not None:
            time = "" if self.floor_us is None else f", {self.floor_us:.1f} us at the memory's peak rate"
            lines.append(f"floor {self.floor_bytes} bytes{time}")
        return "\n".join(lines)


def floor_bytes(
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_heads: int,
    head_size: int,
    v_head_size: int,
) -> int:
    """Return the bytes one step must move at least.

    Each visible key row is read once, the query read and the output written once, new rows read and written.

    Args:
        context_lens: Keys of each sequence, the new ones included.
        query_lens: New tokens of each sequence.
        num_heads: Query heads.
        head_size: Channels of a row.
        v_head_size: Channels of an output head.
    """
    tokens = sum(query_lens)
    rows = sum(context_lens) + 2 * tokens
    return 2 * (rows * head_size + tokens * num_heads * (head_size + v_head_size))


def explain_step(
    step: StepPlan,
    call: Call,
    properties: DeviceProperties,
    resources: Sequence[Resources],
    batch: tuple[Sequence[int], Sequence[int] | None] | None,
) -> Explanation:
    """Return what `step` will do on that GPU.

    Args:
        step: The launches.
        call: The checked node.
        properties: The GPU.
        resources: Those of each launch in order, or none before they are compiled.
        batch: Keys and new tokens (None: one each) of each sequence, for the lower bound; or None.
    """
    used: Sequence[Resources | None] = resources or [None] * len(step.launches)
    moved = None
    if batch is not None:
        context_lens, query_lens = batch
        moved = floor_bytes(
            context_lens,
            [1] * len(context_lens) if query_lens is None else query_lens,
            num_heads=call.num_heads,
            head_size=call.head_size or 0,
            v_head_size=call.v_head_size or 0,
        )
    return Explanation(
        path=step.path,
        reason=step.reason,
        tiles=step.attend.description,
        device=properties.name,
        architecture=architecture_of(*properties.capability),
        workspace_bytes=step.attend.workspace.nbytes,
        kernels=tuple(
            KernelReport(spec.signature.symbol, spec.grid, spec.block, spec.shared_bytes, known)
            for spec, known in zip(step.launches, used, strict=True)
        ),
        floor_bytes=moved,
        floor_us=1e6 * moved / properties.bandwidth if moved is not None and properties.bandwidth else None,
    )
