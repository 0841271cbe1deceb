"""What ptxas says about a kernel, and which of its words fail a build.

Numbers come from the verbose log that NVRTC returns; they are kept beside the cubin, as a cache hit has no
log.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from paged_cuda.errors import CompileError
from paged_cuda.variants import Variant

# setmaxnreg ignored, wgmma serialised, local memory in the way: the kernel still runs, several times slower.
_FATAL_NOTICE = re.compile(r"C(?:750[89]|751[0-5]|7602)\b.*")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one kernel.

    Attributes:
        registers: Registers a thread.
        local_bytes: Stack frame a thread, spills included.
        spill_stores: Bytes of spill stores a thread.
        spill_loads: Bytes of spill loads a thread.
        shared_bytes: Static shared memory a block.
        barriers: Named barriers a block.
    """

    registers: int
    local_bytes: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    barriers: int

    @classmethod
    def from_dict(cls, record: dict[str, int]) -> Resources:
        """Return what `to_dict` gave.

        Raises:
            TypeError: Another set of fields, or a field that is no integer.
        """
        resources = cls(**record)
        if not all(type(value) is int for value in resources.to_dict().values()):
            raise TypeError("resources are integers")
        return resources

    def to_dict(self) -> dict[str, int]:
        """Return the fields by name, for JSON."""
        return asdict(self)


def parse_log(log: str, subject: str) -> Resources:
    """Read the resources of the one kernel that `log` describes.

    Raises:
        CompileError: The log has no resource lines, or holds a notice that makes the kernel unfit.
    """
    notice = _FATAL_NOTICE.search(log)
    if notice is not None:
        raise CompileError("notice", subject, notice[0].strip(), "machine code without this ptxas notice")
    frame, registers, shared = _FRAME.search(log), _REGISTERS.search(log), _SHARED.search(log)
    if frame is None or registers is None:
        raise CompileError("resources", subject, log or "an empty log", "ptxas' resource lines in the log")
    return Resources(
        registers=int(registers[1]),
        local_bytes=int(frame[1]),
        spill_stores=int(frame[2]),
        spill_loads=int(frame[3]),
        shared_bytes=int(shared[1]) if shared else 0,
        barriers=int(registers[2] or 0),
    )


def enforce(variant: Variant, resources: Resources, architecture: str) -> None:
    """Refuse machine code beyond the variant's bounds.

    Raises:
        CompileError: Local memory or registers exceed what stands beside the variant.
    """
    for rule, got, limit in (
        ("local_bytes", resources.local_bytes, variant.max_local_bytes),
        ("registers", resources.registers, variant.max_registers),
    ):
        if got > limit:
            subject = f"{variant.signature.symbol} for {architecture}"
            raise CompileError(rule, subject, got, f"at most {limit} a thread, the bound in variants.py")
