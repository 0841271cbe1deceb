"""Virtual memory without a GPU: addresses are a host mapping that costs nothing until it is touched.

It takes what a driver takes and refuses what a driver refuses: a map over mapped addresses, an unmap or an
access of addresses that are not mapped, a copy that leaves what is mapped and accessible.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import Counter
from dataclasses import dataclass

from paged_cuda.errors import DriverError

GRANULARITY = 2 * 1024 * 1024


@dataclass(slots=True)
class _Reservation:
    block: mmap.mmap
    nbytes: int


@dataclass(slots=True)
class _Handle:
    nbytes: int
    mappings: int = 0
    released: bool = False


@dataclass(slots=True)
class _Mapping:
    nbytes: int
    handle: int
    writable: bool | None = None


class CountedCalls:
    """Counts calls by method, and fails the one that a test has named.

    Attributes:
        calls: How often each method ran.
        failing: Calls still to come of a method until one fails, by its name: 1 fails the next.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failing: dict[str, int] = {}

    def _enter(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.failing:
            self.failing[call] -= 1
            if self.failing[call] == 0:
                del self.failing[call]
                raise DriverError("driver-call", call, "CUDA_ERROR_UNKNOWN", "CUDA_SUCCESS")


class FakeVirtualMemory(CountedCalls):
    """The calls of `VirtualMemory` over host memory.

    Attributes:
        memory: Live device allocations by address.
        reservations: Reserved addresses, by their start.
        handles: Physical memory, by handle; gone once released and unmapped.
        mappings: What is mapped, by its start.
        granularities: The minimum and the recommended granule.
        limit: Device bytes that can be allocated or created as handles; one beyond it fails.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.reservations: dict[int, _Reservation] = {}
        self.handles: dict[int, _Handle] = {}
        self.mappings: dict[int, _Mapping] = {}
        self.granularities = (GRANULARITY, GRANULARITY)
        self._next_handle = 0x7000

    def used_bytes(self) -> int:
        """Device bytes in use, by allocations and by handles that still hold memory."""
        handles = sum(handle.nbytes for handle in self.handles.values())
        return handles + sum(map(len, self.memory.values()))

    def granularity(self, ordinal: int) -> tuple[int, int]:
        self._enter("granularity")
        return self.granularities

    def reserve_addresses(self, nbytes: int, alignment: int) -> int:
        self._enter("reserve_addresses")
        _refuse(nbytes <= 0 or nbytes % self.granularities[0] != 0, "cuMemAddressReserve")
        # A granule more, to return an aligned address inside the block.
        slack = max(alignment, self.granularities[0])
        block = _lazy_block(nbytes + slack)
        start = ctypes.addressof(ctypes.c_char.from_buffer(block))
        pointer = -(-start // slack) * slack
        self.reservations[pointer] = _Reservation(block, nbytes)
        return pointer

    def free_addresses(self, pointer: int, nbytes: int) -> None:
        self._enter("free_addresses")
        found = self.reservations.get(pointer)
        mapped = any(pointer <= start < pointer + nbytes for start in self.mappings)
        _refuse(found is None or found.nbytes != nbytes or mapped, "cuMemAddressFree")
        del self.reservations[pointer]

    def create_handle(self, nbytes: int, ordinal: int) -> int:
        self._enter("create_handle")
        _refuse(nbytes <= 0 or nbytes % self.granularities[0] != 0, "cuMemCreate")
        if self.used_bytes() + nbytes > self.limit:
            raise DriverError("driver-call", "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_SUCCESS")
        self._next_handle += 1
        self.handles[self._next_handle] = _Handle(nbytes)
        return self._next_handle

    def release_handle(self, handle: int) -> None:
        self._enter("release_handle")
        found = self.handles.get(handle)
        if found is None or found.released:
            raise DriverError("driver-call", "cuMemRelease", "CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS")
        found.released = True
        self._forget(handle)

    def map_handle(self, pointer: int, nbytes: int, handle: int) -> None:
        self._enter("map_handle")
        found = self.handles.get(handle)
        inside = any(
            start <= pointer and pointer + nbytes <= start + reservation.nbytes
            for start, reservation in self.reservations.items()
        )
        overlap = any(
            start < pointer + nbytes and pointer < start + mapping.nbytes
            for start, mapping in self.mappings.items()
        )
        bad = found is None or found.released or found.nbytes != nbytes or not inside or overlap
        _refuse(bad or pointer % self.granularities[0] != 0, "cuMemMap")
        self.mappings[pointer] = _Mapping(nbytes, handle)
        self.handles[handle].mappings += 1

    def unmap(self, pointer: int, nbytes: int) -> None:
        self._enter("unmap")
        for start in self._tiles(pointer, nbytes, "cuMemUnmap"):
            mapping = self.mappings.pop(start)
            ctypes.memset(start, 0xEE, min(mapping.nbytes, 4096))  # what was there is gone
            self.handles[mapping.handle].mappings -= 1
            self._forget(mapping.handle)

    def set_access(self, pointer: int, nbytes: int, ordinal: int, *, writable: bool) -> None:
        self._enter("set_access")
        for start in self._tiles(pointer, nbytes, "cuMemSetAccess"):
            self.mappings[start].writable = writable

    def memory_info(self) -> tuple[int, int]:
        self._enter("memory_info")
        return self.limit - self.used_bytes(), self.limit

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._enter("copy_on_device")
        self._reach(target, nbytes)
        self._reach(source, nbytes)
        ctypes.memmove(target, source, nbytes)

    def event_done(self, event: int) -> bool:
        self._enter("event_done")
        return True

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._enter("stream_wait_event")

    def _tiles(self, pointer: int, nbytes: int, call: str) -> list[int]:
        """Return the starts of the mappings that make up a range, which must be whole mappings."""
        starts, at = [], pointer
        while at < pointer + nbytes and at in self.mappings:
            starts.append(at)
            at += self.mappings[at].nbytes
        _refuse(at != pointer + nbytes, call)
        return starts

    def _reach(self, pointer: int, nbytes: int) -> None:
        """Refuse a copy or a fill that touches reserved addresses without memory, or without access."""
        for start, reservation in self.reservations.items():
            if not (start < pointer + nbytes and pointer < start + reservation.nbytes):
                continue
            at = pointer
            while at < pointer + nbytes:
                holder = next((s for s, m in self.mappings.items() if s <= at < s + m.nbytes), None)
                if holder is None or self.mappings[holder].writable is None:
                    raise DriverError("driver-call", "copy", "CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS")
                at = holder + self.mappings[holder].nbytes

    def _forget(self, handle: int) -> None:
        found = self.handles[handle]
        if found.released and found.mappings == 0:
            del self.handles[handle]


def _lazy_block(nbytes: int) -> mmap.mmap:
    """Return host memory that takes none until it is touched."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    no_reserve = 0x4000 if sys.platform == "linux" else 0  # mmap.MAP_NORESERVE is there from Python 3.13 on
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)


def _refuse(wrong: bool, call: str) -> None:
    if wrong:
        raise DriverError("driver-call", call, "CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS")
