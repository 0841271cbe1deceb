"""A driver in host memory that refuses what a real one forbids, fails when told to, and remembers its calls.

It keeps its own map of addresses, so that a test compares the arena's books with somebody else's. With
``backed=True`` the addresses are real host memory: a decode can run in it, and freshly mapped granules hold
garbage, so that a missing zero is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from .fake_memory import NOT_PERMITTED, Bytes, FakeDriverFailure, FakeMemory, MappedGranule

GARBAGE = 0xA5


class FakeVmmDriver(FakeMemory):
    """One device with `total_bytes` of memory; satisfies `VmmDriver`.

    Args:
        granularity: the least size of a granule.
        recommended: the recommended one; None for the same.
        total_bytes: the device's memory.
        backed: whether addresses are real memory of this process, see `view`.
        latency: seconds that a call of a name takes, spent asleep.

    Attributes:
        log: every call: its name and its arguments.
        impossible: what was asked for and is never allowed; a correct caller leaves it empty.
        fail_when: called with the number of a call since `arm` and its name; true makes it fail, with nothing
            done.
    """

    def __init__(
        self,
        granularity: int = 2 << 20,
        *,
        recommended: int | None = None,
        total_bytes: int = 80 << 30,
        backed: bool = False,
        latency: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(granularity, total_bytes, backed)
        self._granularity = (granularity, granularity if recommended is None else recommended)
        self._latency = dict(latency or {})
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.fail_when: Callable[[int, str], bool] | None = None
        self._calls = 0
        self._uses: dict[int, int] = {}
        self._events: dict[int, frozenset[int]] = {}
        self._held: set[int] = set()
        self._undone: dict[int, frozenset[int]] = {}
        self._order: dict[int, set[int]] = {}
        self._capturing: set[int] = set()
        self._numbers = 0

    # What a test asks of it.

    def arm(self, fail_when: Callable[[int, str], bool] | None) -> None:
        """Count calls from here on, and let those fail that `fail_when` names."""
        self._calls, self.fail_when = 0, fail_when

    @property
    def num_calls(self) -> int:
        """Calls since `arm`."""
        return self._calls

    @property
    def num_handles(self) -> int:
        """Physical handles that exist."""
        return len(self._handles)

    @property
    def num_events(self) -> int:
        """Events that exist."""
        return len(self._events)

    @property
    def mapped(self) -> dict[int, int]:
        """Handle by mapped address."""
        return {
            address: entry.handle
            for each in self._reserved.values()
            for address, entry in each.mapped.items()
        }

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses that are reserved."""
        return sum(each.nbytes for each in self._reserved.values())

    def accessible(self, address: int) -> bool:
        """Whether the granule at `address` can be written."""
        entry = self._entry(address)
        return entry is not None and entry.writable

    def view(self, address: int, nbytes: int) -> Bytes:
        """The bytes at `address`, shared with every other view; only mapped and readable ones.

        Raises:
            ImpossibleSequence: a byte is not mapped, not readable, or not backed by real memory.
        """
        self._touch("view", address, nbytes, write=False)
        start, home = self._home(address)
        if home.memory is None:
            self._refuse("view", "the driver was made without backed=True")
        return home.memory[address - start : address - start + nbytes]

    def begin_capture(self, stream: int) -> None:
        """From here on `stream` captures: what `VmmDriver` does not name for that is refused."""
        self._capturing.add(stream)

    def end_capture(self, stream: int) -> None:
        """End a capture."""
        self._capturing.remove(stream)

    def hold(self, stream: int) -> None:
        """Let work on `stream` stay undone until `finish`, or until the host waits for it."""
        self._held.add(stream)

    def launch(self, stream: int, address: int = 0, nbytes: int = 1 << 63) -> None:
        """Work that may touch what is mapped in a range now, such as the replay of a graph."""
        self._enter("launch", stream, on=stream)
        self._work(stream, *(place for place in self.mapped if address <= place < address + nbytes))

    def finish(self, stream: int) -> None:
        """Complete all work on `stream`, and on the streams that it waits for."""
        self._complete(self._order.pop(stream, set()))

    def undone(self, stream: int) -> bool:
        """Whether work on `stream`, or that it waits for, is undone."""
        return bool(self._waits(stream))

    # The protocol.

    def granularity(self) -> tuple[int, int]:
        """See `VmmDriver`."""
        self._enter("granularity", look=True)
        return self._granularity

    def memory_info(self) -> tuple[int, int]:
        """See `VmmDriver`."""
        self._enter("memory_info", look=True)
        return self._total - self._used(), self._total

    def reserve_addresses(self, nbytes: int, alignment: int) -> int:
        """See `VmmDriver`."""
        self._enter("reserve_addresses", nbytes, alignment)
        if nbytes < 1 or nbytes % self._granule or alignment & (alignment - 1):
            self._refuse("reserve_addresses", f"{nbytes} bytes aligned to {alignment}")
        return self._place(self._reserved, nbytes, max(alignment, self._granule))

    def free_addresses(self, address: int, nbytes: int) -> None:
        """See `VmmDriver`."""
        self._enter("free_addresses", address, nbytes)
        home = self._reserved.get(address)
        if home is None or home.nbytes != nbytes or home.mapped:
            self._refuse("free_addresses", f"{address:#x} is no empty reservation of {nbytes} bytes")
        del self._reserved[address]

    def create_handle(self, nbytes: int) -> int:
        """See `VmmDriver`."""
        self._enter("create_handle", nbytes)
        if nbytes < 1 or nbytes % self._granule:
            self._refuse("create_handle", f"{nbytes} bytes is no multiple of the granule")
        self._require_memory(nbytes)
        self._numbers += 1
        self._handles[self._numbers] = nbytes
        self._uses[self._numbers] = 0
        return self._numbers

    def release_handle(self, handle: int) -> None:
        """See `VmmDriver`."""
        self._enter("release_handle", handle)
        if self._uses.get(handle, 1):
            self._refuse("release_handle", f"handle {handle} is unknown or still mapped")
        del self._handles[handle], self._uses[handle]

    def map_handle(self, address: int, nbytes: int, handle: int) -> None:
        """See `VmmDriver`."""
        self._enter("map_handle", address, nbytes, handle)
        start, home = self._home(address)
        if (
            start not in self._reserved
            or (address - start) % nbytes
            or address + nbytes > start + home.nbytes
        ):
            self._refuse("map_handle", f"{address:#x} is no granule of a reservation")
        if address in home.mapped or self._handles.get(handle) != nbytes:
            self._refuse("map_handle", f"{address:#x} is mapped, or handle {handle} is not of {nbytes} bytes")
        home.mapped[address] = MappedGranule(handle)
        self._uses[handle] += 1
        if home.memory is not None:
            home.memory[address - start : address - start + nbytes] = GARBAGE

    def unmap(self, address: int, nbytes: int) -> None:
        """See `VmmDriver`; refused while a held stream has work that may touch it."""
        self._enter("unmap", address, nbytes)
        entry = self._entry(address)
        if entry is None or self._handles[entry.handle] != nbytes:
            self._refuse("unmap", f"{address:#x} is not mapped with {nbytes} bytes")
        if any(address in touched for touched in self._undone.values()):
            self._refuse("unmap", f"undone work may touch {address:#x}")
        del self._home(address)[1].mapped[address]
        self._uses[entry.handle] -= 1

    def set_access(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        """See `VmmDriver`."""
        self._enter("set_access", address, nbytes)
        for _, entry in self._entries("set_access", address, nbytes):
            entry.readable, entry.writable = True, writable

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """See `VmmDriver`."""
        self._enter("fill", address, byte, nbytes, stream, on=stream)
        touched = self._touch("fill", address, nbytes, write=True)
        start, home = self._home(address)
        if home.memory is not None:
            home.memory[address - start : address - start + nbytes] = byte
        self._work(stream, *touched)

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """See `VmmDriver`."""
        self._enter("copy_on_device", target, source, nbytes, stream, on=stream)
        touched = self._touch("copy_on_device", target, nbytes, write=True)
        touched += self._touch("copy_on_device", source, nbytes, write=False)
        if abs(target - source) < nbytes:
            self._refuse("copy_on_device", f"{nbytes} bytes at {source:#x} and {target:#x} overlap")
        if self._backed:
            self.view(target, nbytes)[:] = self.view(source, nbytes)
        self._work(stream, *touched)

    def create_event(self) -> int:
        """See `VmmDriver`."""
        self._enter("create_event", look=True)
        self._numbers += 1
        self._events[self._numbers] = frozenset()
        return self._numbers

    def destroy_event(self, event: int) -> None:
        """See `VmmDriver`."""
        self._enter("destroy_event", event)
        self._event("destroy_event", event)
        del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        """See `VmmDriver`."""
        self._enter("record_event", event, stream, on=stream)
        self._event("record_event", event)
        self._events[event] = self._waits(stream)

    def event_done(self, event: int) -> bool:
        """See `VmmDriver`."""
        self._enter("event_done", event)
        return not self._event("event_done", event) & self._undone.keys()

    def wait_event(self, event: int) -> None:
        """See `VmmDriver`."""
        self._enter("wait_event", event)
        self._complete(self._event("wait_event", event))

    def stream_wait_event(self, stream: int, event: int) -> None:
        """See `VmmDriver`."""
        self._enter("stream_wait_event", stream, event, on=stream)
        self._order.setdefault(stream, set()).update(self._event("stream_wait_event", event))

    def synchronize(self, stream: int) -> None:
        """See `VmmDriver`."""
        self._enter("synchronize", stream)
        self.finish(stream)

    def allocate(self, nbytes: int) -> int:
        """See `VmmDriver`."""
        self._enter("allocate", nbytes)
        self._require_memory(nbytes)
        return self._place(self._allocated, nbytes, 512)

    def free(self, address: int) -> None:
        """See `VmmDriver`."""
        self._enter("free", address)
        if address not in self._allocated:
            self._refuse("free", f"{address:#x} was not allocated")
        del self._allocated[address]

    # How it does it.

    def _enter(self, name: str, *arguments: int, look: bool = False, on: int = 0) -> None:
        if name in self._latency:
            time.sleep(self._latency[name])
        if self._capturing and not look and (not on or on in self._capturing):
            self._refuse(name, f"streams {sorted(self._capturing)} capture", NOT_PERMITTED)
        number, self._calls = self._calls, self._calls + 1
        if self.fail_when is not None and self.fail_when(number, name):
            raise FakeDriverFailure(f"{name} failed, as call {number}")
        self.log.append((name, arguments))

    def _event(self, name: str, event: int) -> frozenset[int]:
        """The work that the event waits for."""
        if event not in self._events:
            self._refuse(name, f"there is no event {event}")
        return self._events[event]

    def _waits(self, stream: int) -> frozenset[int]:
        """Undone work that whatever comes next on `stream` waits for."""
        return frozenset(self._order.get(stream, set()) & self._undone.keys())

    def _work(self, stream: int, *touched: int) -> None:
        """Note work on `stream`; it is done at once unless the stream is held, or waits for undone work."""
        if stream in self._held or self._waits(stream):
            self._numbers += 1
            self._undone[self._numbers] = frozenset(touched)
            self._order.setdefault(stream, set()).add(self._numbers)

    def _complete(self, work: Iterable[int]) -> None:
        for number in work:
            self._undone.pop(number, None)
