"""What debug kernels found wrong that the host could not see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged_cuda.device import Device, DeviceMemory

# The numbers of `enum Violation` in kernels/layout/violations.cuh.
KINDS = {
    1: "slot out of range",
    2: "block id out of range",
    3: "negative past length",
    4: "position beyond the rotary tables",
    5: "position beyond the block table",
}
_NBYTES = 16


@dataclass(frozen=True, slots=True)
class Violations:
    """Counted since the last reset.

    Attributes:
        count: How many.
        kind: What the first one was, or None.
        token: Its token's row in the batch, or None.
        value: The offending number, or None.
    """

    count: int
    kind: str | None = None
    token: int | None = None
    value: int | None = None

    @classmethod
    def decode(cls, count: int, first: int) -> Violations:
        """Read the two words that the kernels keep."""
        if count == 0:
            return cls(0)
        value = first & 0xFFFFFFFF
        return cls(count, KINDS[first >> 32 & 15], first >> 36, value - (value >> 31 << 32))


class ViolationCounter:
    """The two words on a GPU that debug kernels write: how many violations, and the first.

    Attributes:
        pointer: Their address.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = DeviceMemory(device, _NBYTES)
        self.pointer = self._memory.pointer
        self.reset(0)

    def read(self, stream: int) -> Violations:
        """Wait for the stream and return what was counted."""
        words = np.zeros(2, np.uint64)
        with self._device as device:
            device.driver.copy_to_host(words.ctypes.data, self.pointer, _NBYTES, stream)
            device.driver.synchronize(stream)
        return Violations.decode(int(words[0]), int(words[1]))

    def reset(self, stream: int) -> None:
        """Forget what was counted, and wait for that."""
        with self._device as device:
            device.driver.fill(self.pointer, 0, 8, stream)
            device.driver.fill(self.pointer + 8, 0xFF, 8, stream)
            device.driver.synchronize(stream)
