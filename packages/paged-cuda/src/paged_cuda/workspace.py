"""Scratch memory as an explicit object, sized by bounds alone.

Operators that run one after the other in one stream may share a workspace. Graphs that replay at the same
time need one each.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_cuda.device import Device, DeviceMemory
from paged_cuda.errors import ArgumentMismatch

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """Where each region of a path's scratch memory begins.

    Attributes:
        regions: (name, offset, bytes), offsets aligned to 256.
    """

    regions: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, **sizes: int) -> WorkspaceLayout:
        """Lay regions of these sizes one after the other; a size of 0 gives no region.

        Example:
            >>> WorkspaceLayout.of(records=100, partials=1000).offset("partials")
            256
        """
        regions, offset = [], 0
        for name, nbytes in sizes.items():
            if nbytes:
                regions.append((name, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(regions))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        if not self.regions:
            return 0
        _, offset, nbytes = self.regions[-1]
        return offset + -(-nbytes // ALIGNMENT) * ALIGNMENT

    def nbytes_of(self, name: str) -> int:
        """Return the bytes of region `name`, 0 if there is none."""
        return next((nbytes for region, _, nbytes in self.regions if region == name), 0)

    def offset(self, name: str) -> int:
        """Return where region `name` begins."""
        return next(offset for region, offset, _ in self.regions if region == name)


class Workspace:
    """Scratch memory on one GPU.

    Attributes:
        device: Where it lies.
        nbytes: How much there is.
        pointer: Its address.

    Raises:
        ArgumentMismatch: Not a number of bytes.
        DriverError: The GPU is out of memory.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        if type(nbytes) is not int or nbytes < 0:
            raise ArgumentMismatch("workspace", "nbytes", repr(nbytes), "an integer, not negative")
        self._memory = DeviceMemory(device, nbytes)
        self.device = device
        self.nbytes = nbytes
        self.pointer = self._memory.pointer
        # Who wrote the schedule that lies here, and for which extents.
        self.schedule: object = None

    def admit(self, nbytes: int, device: Device) -> None:
        """Refuse to serve an operator that needs more, or another GPU.

        Raises:
            ArgumentMismatch: It is too small or lies elsewhere.
        """
        if nbytes > self.nbytes:
            raise ArgumentMismatch(
                "workspace", "workspace", f"{self.nbytes} bytes", f"at least {nbytes} bytes"
            )
        if device.ordinal != self.device.ordinal:
            raise ArgumentMismatch("device", "workspace", self.device.ordinal, f"GPU {device.ordinal}")
