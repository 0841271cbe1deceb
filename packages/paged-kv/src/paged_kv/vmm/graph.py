"""When a captured graph survives a growth of the cache, and when it must be captured again.

It survives if nothing that it has baked in changed: the device pointers, the physical shapes, the addressing
of row 0, which must not depend on the capacity, and the mask, which must have been committed before. Whatever
is not known counts as changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from paged_kv.errors import GraphOutOfOrder


@dataclass(frozen=True, slots=True)
class BindingSignature:
    """What a graph bakes in of one cache tensor.

    Attributes:
        address: its device pointer.
        shape: its physical shape.
        fixed_row: whether the addresses of row 0 are the same at every capacity; None when unknown.
        mask_committed: whether the whole mask is backed already; None when unknown.
    """

    address: int
    shape: tuple[int, ...]
    fixed_row: bool | None
    mask_committed: bool | None


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """What a graph bakes in of a cache and of the index plan's buffers.

    Attributes:
        bindings: one a cache tensor.
        plan_buffers: device addresses of the index tensors.
    """

    bindings: tuple[BindingSignature, ...]
    plan_buffers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphKeepDecision:
    """Whether to keep the graph, and why.

    Attributes:
        keep: whether it may be replayed.
        reason: the four dependencies, or the first difference.

    Example:
        >>> before = GraphSignature((BindingSignature(4096, (1, 64, 2, 64), True, True),))
        >>> after = GraphSignature((BindingSignature(8192, (1, 64, 2, 64), True, True),))
        >>> GraphKeepDecision.between(before, after).reason
        'binding 0: the address was 0x1000 and is 0x2000'
    """

    keep: bool
    reason: str

    @classmethod
    def between(cls, before: GraphSignature | None, after: GraphSignature | None) -> GraphKeepDecision:
        """Compare what was captured with what is there now."""
        if before is None or after is None:
            return cls(
                False, "there is no earlier signature" if before is None else "the signature is unknown"
            )
        if len(before.bindings) != len(after.bindings):
            return cls(False, f"there were {len(before.bindings)} bindings and are {len(after.bindings)}")
        for number, (old, new) in enumerate(zip(before.bindings, after.bindings, strict=True)):
            difference = _difference(old, new)
            if difference:
                return cls(False, f"binding {number}: {difference}")
        if before.plan_buffers != after.plan_buffers:
            return cls(False, "the index plan's buffers moved")
        return cls(True, "pointers, shapes, addressing of row 0 and mask are unchanged")


def _difference(old: BindingSignature, new: BindingSignature) -> str | None:
    if old.address != new.address:
        return f"the address was {old.address:#x} and is {new.address:#x}"
    if old.shape != new.shape:
        return f"the shape was {old.shape} and is {new.shape}"
    if not (old.fixed_row and new.fixed_row):
        return "the addressing of row 0 depends on the capacity, or is unknown"
    if not (old.mask_committed and new.mask_committed):
        return "the mask was not fully committed, or it is unknown"
    return None


class GraphAction(StrEnum):
    """What a decode step does."""

    EAGER = "eager"
    WARM = "warm"
    CAPTURE = "capture"
    REPLAY = "replay"


class GraphLifecycle:
    """One graph after another: each costs a warm step and a capture step, then it is replayed.

    Args:
        enabled: False for steps that are never captured.

    Attributes:
        captures: graphs captured.
        replays: steps replayed.

    Example:
        >>> graph = GraphLifecycle()
        >>> for _ in range(3):
        ...     with graph.step() as action:
        ...         print(action)
        warm
        capture
        replay
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.captures = 0
        self.replays = 0
        self._next = GraphAction.WARM
        self._inside = False

    @property
    def action(self) -> GraphAction:
        """What the next step does."""
        return self._next if self.enabled else GraphAction.EAGER

    @contextmanager
    def step(self) -> Iterator[GraphAction]:
        """One decode step. A step that raises did not happen: the next one does the same.

        Raises:
            GraphOutOfOrder: a step is open.
        """
        if self._inside:
            raise GraphOutOfOrder("a step of this graph is open; steps do not nest", action=str(self.action))
        action, before = self.action, self._next
        self._inside = True
        try:
            yield action
        finally:
            self._inside = False
        self.captures += action is GraphAction.CAPTURE
        self.replays += action is GraphAction.REPLAY
        if action is not GraphAction.EAGER and self._next is before:
            self._next = GraphAction.CAPTURE if action is GraphAction.WARM else GraphAction.REPLAY

    def require_between_steps(self) -> None:
        """Refuse what must not happen to the cache of a step that may be replaying.

        Raises:
            GraphOutOfOrder: a step is open.
        """
        if self._inside:
            raise GraphOutOfOrder(
                "the cache grows between steps, not inside one; grow it first", action=str(self.action)
            )

    def invalidate(self) -> None:
        """The graph must not be replayed any more.

        Raises:
            GraphOutOfOrder: a step is open, which may be replaying it.
        """
        self.require_between_steps()
        self._next = GraphAction.WARM
