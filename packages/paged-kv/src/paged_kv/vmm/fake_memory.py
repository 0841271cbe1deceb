"""The memory of the fake driver: reservations, mappings, allocations, and what may be touched."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
OUT_OF_MEMORY, INVALID, NOT_PERMITTED = 2, 1, 900
FIRST_ADDRESS = 0x7000_0000_0000


class FakeDriverFailure(RuntimeError):  # noqa: N818
    """A call failed because the test said so, or for want of memory."""

    def __init__(self, message: str, code: int = OUT_OF_MEMORY) -> None:
        super().__init__(message)
        self.code = code


class ImpossibleSequence(FakeDriverFailure):
    """The caller asked for what no driver allows; also kept in `FakeVmmDriver.impossible`."""

    def __init__(self, message: str, code: int = INVALID) -> None:
        super().__init__(message, code)


@dataclass(slots=True)
class MappedGranule:
    """A granule of addresses that shows a handle."""

    handle: int
    readable: bool = False
    writable: bool = False


@dataclass(slots=True)
class FakeRange:
    """A reservation or an allocation."""

    nbytes: int
    memory: Bytes | None = None
    mapped: dict[int, MappedGranule] = field(default_factory=dict)


class FakeMemory:
    """One device's memory, and the list of what was asked of it that is impossible."""

    def __init__(self, granule: int, total_bytes: int, backed: bool) -> None:
        self.impossible: list[str] = []
        self._granule, self._total, self._backed = granule, total_bytes, backed
        self._next = FIRST_ADDRESS
        self._reserved: dict[int, FakeRange] = {}
        self._allocated: dict[int, FakeRange] = {}
        self._handles: dict[int, int] = {}

    def _refuse(self, name: str, why: str, code: int = INVALID) -> NoReturn:
        self.impossible.append(f"{name}: {why}")
        raise ImpossibleSequence(self.impossible[-1], code)

    def _used(self) -> int:
        return sum(self._handles.values()) + sum(each.nbytes for each in self._allocated.values())

    def _require_memory(self, nbytes: int) -> None:
        if self._used() + nbytes > self._total:
            raise FakeDriverFailure(f"{nbytes} bytes asked for, {self._total - self._used()} are free")

    def _place(self, where: dict[int, FakeRange], nbytes: int, alignment: int) -> int:
        if self._backed:
            memory = np.frombuffer(mmap.mmap(-1, nbytes + alignment), dtype=np.uint8)
            address = -(-memory.ctypes.data // alignment) * alignment
            skipped = address - memory.ctypes.data
            where[address] = FakeRange(nbytes, memory[skipped : skipped + nbytes])
            return address
        address = -(-self._next // alignment) * alignment
        self._next = address + nbytes + alignment
        where[address] = FakeRange(nbytes)
        return address

    def _home(self, address: int) -> tuple[int, FakeRange]:
        for where in (self._reserved, self._allocated):
            for start, home in where.items():
                if start <= address < start + home.nbytes:
                    return start, home
        self.impossible.append(f"{address:#x} was never reserved")
        raise ImpossibleSequence(self.impossible[-1])

    def _entry(self, address: int) -> MappedGranule | None:
        return self._home(address)[1].mapped.get(address)

    def _entries(self, name: str, address: int, nbytes: int) -> list[tuple[int, MappedGranule]]:
        """The mappings that a range lies in, all of which must be there, with their addresses."""
        found = []
        start, home = self._home(address)
        place = address
        while place < address + nbytes:
            at = place - (place - start) % self._granule
            while at not in home.mapped and at > start:
                at -= self._granule
            entry = home.mapped.get(at)
            if entry is None or at + self._handles[entry.handle] <= place:
                self._refuse(name, f"{place:#x} is not mapped")
            found.append((at, entry))
            place = at + self._handles[entry.handle]
        return found

    def _touch(self, name: str, address: int, nbytes: int, *, write: bool) -> list[int]:
        """The mapped granules that a range lies in, which must be there and accessible."""
        start, home = self._home(address)
        if start in self._allocated:
            if address + nbytes > start + home.nbytes:
                self._refuse(name, f"{address + nbytes:#x} lies beyond an allocation")
            return []
        entries = self._entries(name, address, nbytes)
        if not all(entry.readable and (entry.writable or not write) for _, entry in entries):
            self._refuse(name, f"{address:#x} is mapped without access")
        return [at for at, _ in entries]
