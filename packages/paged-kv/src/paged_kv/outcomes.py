"""What an engine meets in normal work: not enough room now, or never.

They are values, so that no caller catches them by chance.

An outcome always means that nothing was changed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CapacityDeferred:
    """There is no room now; waiting, completing steps or releasing rows can help.

    Attributes:
        needed: pages (or rows, or host pages: see `reason`) that were asked for.
        available: how many of them could be given now.
        after_fence: how many could be given once every step in flight is complete.
        reason: ``"pages"``, ``"watermark"``, ``"quota"``, ``"rows"`` or ``"host_pages"``.
    """

    needed: int
    available: int
    after_fence: int
    reason: str = "pages"


@dataclass(frozen=True, slots=True)
class UnserviceableRequest:
    """There can never be room, however long one waits: reject the request.

    Attributes:
        needed: pages (or rows, or tokens: see `reason`) that were asked for.
        usable: the most that this manager could ever give.
        reason: ``"pages"``, ``"watermark"``, ``"quota"``, ``"rows"``, ``"columns"`` or ``"host_pages"``.
    """

    needed: int
    usable: int
    reason: str = "pages"


@dataclass(frozen=True, slots=True)
class PoolShrinkRefused:
    """The end of the pool is in use; releasing rows, completing steps or a higher number can help.

    Attributes:
        requested: pages to keep, the null page included.
        lowest: the fewest that could be kept now.
        live: pages beyond `requested` that somebody holds.
        fenced: pages beyond it that wait for steps in flight.
        promised: pages promised to admitted rows and not taken yet, which the rest must still hold.
    """

    requested: int
    lowest: int
    live: int
    fenced: int
    promised: int
