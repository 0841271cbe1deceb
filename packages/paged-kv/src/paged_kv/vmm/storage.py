"""A cache that grows in place, in reserved addresses, and what any storage of a growing cache can do.

A storage says what it moved. A growth that fails leaves tokens, addresses and capacity as they were; memory
that was committed for it may stay committed, and the next try finds it. `ContentLost` says that stripes could
not be moved back; the storage does not grow again before it was released.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from paged_kv.errors import ContentLost, InvalidGeometry, LayoutRefused

from .arena import VirtualArena
from .capture import CaptureGate
from .commit import CommitOutcome
from .decommit import DecommitOutcome
from .geometry import KvCacheGeometry, KvLayout, live_prefix_ranges
from .graph import BindingSignature, GraphSignature
from .handle_pool import HandlePool
from .ledger import AdmissionRefused
from .placement import BasePlacement, Placement
from .restride import CopyJournal, stripe_moves


@dataclass(frozen=True, slots=True)
class GrowthWork:
    """What making room took.

    Attributes:
        billed_bytes: bytes mapped or allocated that were not there before.
        granted: whether a grant or lease was needed.
        moved: whether tokens are elsewhere now, so that the reference's formula counts them.
        copied_bytes: bytes that were really copied.
    """

    billed_bytes: int
    granted: bool
    moved: bool
    copied_bytes: int


class KvStorage(Protocol):
    """What holds a cache and can make it larger."""

    geometry: KvCacheGeometry
    gate: CaptureGate

    @property
    def physical_bytes(self) -> int:
        """Bytes of device memory behind it."""
        ...

    def address_of(self, binding: int) -> int:
        """The device address of a binding now."""
        ...

    def signature(self, capacity: int) -> GraphSignature:
        """What a graph bakes in at a capacity of so many tokens."""
        ...

    def grow(self, old: int, new: int, stream: int) -> GrowthWork | AdmissionRefused:
        """Make room for `new` tokens a row where there was room for `old`, in the order of `stream`."""
        ...

    def close(self) -> None:
        """Give all of it back."""
        ...


class MappedStorage:
    """A cache in one arena. Addresses are for ever; only the bucket layout of head-major moves bytes.

    Args:
        geometry: the cache, all of whose bindings have one layout.
        pool: where memory comes from.
        placement: whether bindings share granules.
        align: what a packed base is a multiple of.

    Raises:
        InvalidGeometry: bindings of several layouts.
        GranularityMismatch, CaptureInProgress, DriverCallFailed: see `VirtualArena`.
    """

    def __init__(
        self,
        geometry: KvCacheGeometry,
        pool: HandlePool,
        placement: BasePlacement = BasePlacement.GRANULE_ALIGNED,
        *,
        align: int = 256,
    ) -> None:
        self.geometry, self.gate = geometry, pool.gate
        self.layout = layout_of(geometry)
        self.arena = VirtualArena(Placement.of(geometry, pool.granule, placement, align=align), pool)
        self._written = 0
        self._lost = False
        self._signature: GraphSignature | None = None
        self._planning = threading.Lock()

    @property
    def physical_bytes(self) -> int:
        """Bytes mapped."""
        return self.arena.mapped_bytes

    def address_of(self, binding: int) -> int:
        """The device address of a binding, for ever; see `VirtualArena.address_of`."""
        return self.arena.address_of(binding)

    def signature(self, capacity: int) -> GraphSignature:
        """What a graph bakes in. The whole stride is addressable, so a mask over it is committed at once."""
        if self._signature is not None:
            return self._signature
        fixed = not self.layout.is_head_major
        shapes = {binding: binding.physical_shape(capacity) for binding in set(self.geometry.bindings)}
        addresses = (self.arena.placement.bases + self.arena.address).tolist()
        found = GraphSignature(
            tuple(
                BindingSignature(address, shapes[binding], fixed, not self.layout.grows)
                for address, binding in zip(addresses, self.geometry.bindings, strict=True)
            )
        )
        if not self.layout.grows:  # nothing in it depends on the capacity
            self._signature = found
        return found

    def commit(self, tokens: int, stream: int) -> CommitOutcome | AdmissionRefused:
        """Back `tokens` tokens a row without publishing them; see `VirtualArena.commit`."""
        self.gate.require_not_capturing()
        with self._planning:
            plan = self.arena.planner.plan(self.arena.table, tokens, tokens)
            return self.arena.commit(plan, stream=stream)

    def grow(self, old: int, new: int, stream: int) -> GrowthWork | AdmissionRefused:
        """See `KvStorage`.

        Raises:
            ContentLost: stripes could not be moved back, now or at an earlier growth.
        """
        if self._lost:
            raise ContentLost(
                "an earlier growth lost this cache's tokens; shrink it to nothing, or close it",
                old=old,
                new=new,
            )
        done = self.commit(new, stream)
        if isinstance(done, AdmissionRefused):
            return done
        if not done.billed_bytes:
            self.arena.wait_ready(stream)  # committed ahead, perhaps on another stream
        moves = self.layout is KvLayout.HEAD_MAJOR_BUCKET and old > 0
        try:
            copied = self._restride(old, new, stream) if moves else 0
        except ContentLost:
            self._lost = True
            raise
        self._wipe(old, min(new, self._written), stream)
        self._written = max(self._written, new)
        return GrowthWork(done.billed_bytes, done.granted, moves, copied)

    def shrink(self, tokens: int) -> DecommitOutcome:
        """Give back what `tokens` tokens a row do not need; see `VirtualArena.decommit`.

        Raises:
            LayoutRefused: tokens would have to move together.
        """
        if tokens and self.layout is KvLayout.HEAD_MAJOR_BUCKET:
            raise LayoutRefused(
                f"{self.layout} cannot shrink to {tokens} tokens: its stripes would have to move; release it",
                layout=str(self.layout),
                given=tokens,
            )
        self.gate.require_not_capturing()
        with self._planning:
            outcome = self.arena.decommit(self.arena.planner.shrink_plan(self.arena.table, tokens, tokens))
        self._lost = self._lost and tokens > 0
        return outcome

    def close(self) -> None:
        """Wait for what was launched, and give everything back; see `VirtualArena.close`."""
        if not self.arena.is_closed:
            self.arena.wait_idle()
        self.arena.close()

    def _restride(self, old: int, new: int, stream: int) -> int:
        """Spread the stripes of every binding, last one first, and zero what lies between them."""
        pool = self.arena.pool
        journal = CopyJournal(pool.calls, stream)
        with self.gate.memory(), journal, self.arena.fence.launching(stream):
            for number, binding in enumerate(self.geometry.bindings):
                base, unit = self.address_of(number), binding.bytes_per_head
                for target, source, nbytes in stripe_moves(binding, old, new):
                    journal.copy(base + target, base + source, nbytes)
                for stripe in range(binding.batch * binding.kv_heads):
                    start = base + (stripe * new + old) * unit
                    pool.calls("zero", pool.driver.fill, start, 0, (new - old) * unit, stream)
        return journal.copied_bytes

    def _wipe(self, old: int, new: int, stream: int) -> None:
        """Zero what shrunk away and comes back in granules that stayed mapped."""
        pool = self.arena.pool
        if new <= old or self.layout is KvLayout.HEAD_MAJOR_BUCKET:
            return
        with self.gate.memory(), self.arena.fence.launching(stream):
            for number, binding in enumerate(self.geometry.bindings):
                unit, base = binding.contiguous_bytes_per_token, self.address_of(number)
                for start, end in live_prefix_ranges(binding, new, new).tolist():
                    first = start + old * unit
                    pool.calls("zero", pool.driver.fill, base + first, 0, end - first, stream)


def layout_of(geometry: KvCacheGeometry) -> KvLayout:
    """The one layout of all bindings.

    Raises:
        InvalidGeometry: there are several.
    """
    layouts = {binding.layout for binding in geometry.bindings}
    if len(layouts) != 1:
        raise InvalidGeometry(
            f"the bindings have layouts {sorted(layouts)}; a storage has one", layouts=len(layouts)
        )
    return layouts.pop()
