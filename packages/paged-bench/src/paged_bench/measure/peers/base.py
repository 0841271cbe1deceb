"""What a peer is: another implementation of the same attention, checked before it is timed.

Invariant: a peer gets queries that are rotated already and a cache that holds every row, and its inputs
rotate beyond the L2 as ours do. What it prepares once a step (schedules, plans, gathered pages) is outside
its time, as is ours.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Protocol

from paged_cuda import DeviceArray

from paged_bench.measure.bench import Bench, Launch
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.suite import CaseSpec
from paged_bench.measure.timing import Capture


class Unsuitable(Exception):  # noqa: N818 - an outcome, named for what happened
    """A peer does not serve a case; the message says why."""


@dataclass(frozen=True)
class PeerCalls:
    """A peer made ready for a case.

    Attributes:
        launches: One call for each set, in the bench's stream.
        output: Where the first of them writes: (tokens, heads * v_head_size), contiguous.
        capture: How its calls are recorded into a graph; None where they cannot be.
        label: What is added to its name, such as the backend that it chose.
        tolerance_factor: How much wider than ours its rounding may be.
    """

    launches: Sequence[Launch]
    output: DeviceArray
    capture: Capture | None
    label: str = ""
    tolerance_factor: float = 1.0


class Peer(Protocol):
    """Another implementation."""

    @property
    def name(self) -> str:
        """What `--peers` calls it."""
        ...

    @property
    def title(self) -> str:
        """What tables call it."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """What must be importable."""
        ...

    @property
    def distribution(self) -> str:
        """Whose version is recorded."""
        ...

    def prepare(self, bench: Bench, spec: CaseSpec, sets: Sequence[InputSet]) -> PeerCalls:
        """Make it ready.

        Raises:
            Unsuitable: It does not serve the case.
        """
        ...


def is_installed(peer: Peer) -> bool:
    """Return whether everything that the peer needs can be found, without importing it."""
    for module in peer.modules:
        try:
            if importlib.util.find_spec(module) is None:
                return False
        except (ModuleNotFoundError, ValueError):
            return False
    return True


def version_of(peer: Peer) -> str | None:
    """Return the installed version."""
    try:
        return metadata.version(peer.distribution)
    except metadata.PackageNotFoundError:
        return None


def module(name: str) -> ModuleType:
    """Import a peer's module; its types are not known here."""
    return importlib.import_module(name)


def rope_width(spec: CaseSpec) -> int:
    """Return the channels behind the value part of a row."""
    return spec.head_size - spec.v_head_size


def refuse(*reasons: tuple[bool, str]) -> None:
    """Raise the first reason whose condition holds.

    Raises:
        Unsuitable: One does.
    """
    for holds, reason in reasons:
        if holds:
            raise Unsuitable(reason)
