"""What one manager owns, in one place, for the modules that carry out its operations.

Nothing here is public. `Epochs` numbers the steps: an epoch is in flight from `begin_step` until
`complete`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .admission import AdmissionLedger
from .block_pool import BlockPool, PageChoice
from .block_table import SWAPPING_IN, SWAPPING_OUT, BlockTable
from .errors import ForeignClaim, RowBusy
from .events import EventLog
from .geometry import PageGeometry
from .prefix_cache import PagePins, PrefixCache, PrefixHit
from .stats import Tally

if TYPE_CHECKING:
    from .step import StepTransaction
    from .swap import HostPool, SwapPlan

Int64Array = npt.NDArray[np.int64]


class InFlight(NamedTuple):
    """The rows of a committed step and the lengths that completing it settles."""

    epoch: int
    slots: Int64Array
    handles: Int64Array
    stamp: int
    lengths: Int64Array


class RecentBatch(NamedTuple):
    """The last batch that was found to be of distinct rows that can be planned."""

    handles: Int64Array
    slots: Int64Array
    departures: int


NO_BATCH = RecentBatch(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), 0)


@dataclass(slots=True)
class Epochs:
    """Step numbers. ``completed <= launched <= begun``; what lies between the first two is in flight."""

    begun: int = 0
    launched: int = 0
    completed: int = 0
    pending: deque[InFlight] = field(default_factory=deque)

    @property
    def fence(self) -> int:
        """The epoch that a page given back now waits for; 0 when nothing is in flight."""
        return self.launched if self.launched > self.completed else 0


@dataclass(slots=True)
class KVState:
    """Everything that the operations of one manager read and write."""

    geometry: PageGeometry
    pool: BlockPool
    table: BlockTable
    prefix: PrefixCache
    ledger: AdmissionLedger
    host: HostPool
    events: EventLog
    epochs: Epochs = field(default_factory=Epochs)
    tally: Tally = field(default_factory=Tally)
    step: StepTransaction | None = None
    recent: RecentBatch = NO_BATCH
    open_pins: dict[int, PagePins] = field(default_factory=dict)
    open_swaps: dict[int, SwapPlan] = field(default_factory=dict)

    def require_own(self, claim: PagePins | SwapPlan) -> None:
        """Refuse pins and swaps that this manager does not know: another's, copies, or made by hand.

        Raises:
            HitClosed, SwapClosed: it was finished before.
            ForeignClaim: this manager never gave it out.
        """
        claim.require_open()
        if self.open_pins.get(id(claim)) is not claim and self.open_swaps.get(id(claim)) is not claim:
            raise ForeignClaim(f"this {type(claim).__name__} was not given out by this manager")

    def require_hit(self, hit: PrefixHit) -> None:
        """As `require_own`, and refuse what is no hit: the pins of a row are not the front of a prompt."""
        if not isinstance(hit, PrefixHit):
            raise ForeignClaim(f"a {type(hit).__name__} is not a hit; use what lookup_and_pin returned")
        self.require_own(hit)

    def require_idle(self, slots: Int64Array) -> None:
        """Refuse rows that an open step or an unconfirmed swap holds.

        Raises:
            RowBusy: with the first such row.
        """
        busy = (self.table.state[slots] == SWAPPING_OUT) | (self.table.state[slots] == SWAPPING_IN)
        if self.step is not None:
            busy |= np.isin(slots, self.step.slots)
        if busy.any():
            row = int(slots[np.flatnonzero(busy)[0]])
            raise RowBusy(f"row {row} belongs to an open step or swap; finish that first", row=row)

    def apply_take(self, choice: PageChoice) -> None:
        """Give the chosen pages one reference each and forget the content that they held."""
        self.pool.apply_take(choice)
        if len(choice.evicted):
            self.prefix.apply_forget(choice.evicted.tolist())

    def apply_attached(self, slot: int, num_tokens: int) -> None:
        """Count attached tokens as complete, once the steps in flight are: they may still write them."""
        if not (self.epochs.fence and num_tokens):
            self.table.settled[slot] = num_tokens
            return
        row = np.array([slot])
        handle, stamp = self.table.handle[row], self.table.last_version
        lengths = np.array([num_tokens], dtype=np.int64)
        self.epochs.pending.append(InFlight(self.epochs.fence, row, handle, stamp, lengths))

    def take_back(
        self, slots: Int64Array, start: Int64Array, stop: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Cells and pages of columns ``[start, stop)`` of each row, tail first.

        Raises:
            PageDoubleFree: a cell names a page that nobody holds.
        """
        cells, _ = self.table.span(slots, start, stop)
        pages = self.table.flat[cells].astype(np.int64)
        self.pool.require_refs(pages)
        return cells, pages
