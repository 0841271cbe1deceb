"""How a block asks leave to load further tiles, modelled: nobody hangs, and every tile is counted once.

`kernels/sm90/pace.cuh` says the same for the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_cuda.sources import kernel_source

ASK_TILES, FREE_ASKS = 2, 2


class Barrier:
    """An mbarrier of one arrival: who waits for a parity sees only whether the last phase had it."""

    def __init__(self) -> None:
        self.completed = 0

    def arrive(self) -> None:
        """Complete a phase."""
        self.completed += 1

    def passes(self, parity: int) -> bool:
        """Return what try_wait returns."""
        return self.completed % 2 != parity


def last_ask_of(tiles: int) -> int:
    """Return the number of a slice's last ask."""
    return (tiles - 1) // ASK_TILES


def loader(tiles: int, asked: Barrier, granted: Barrier, begun: Callable[[], None]) -> Iterator[None]:
    """Yield wherever the other side may go on."""
    for left in range(tiles - 1, -1, -1):
        begun()
        yield
        if left % ASK_TILES:
            continue
        ask = last_ask_of(tiles) - left // ASK_TILES
        while ask > 0 and not granted.passes((ask - 1) % 2):
            yield
        asked.arrive()
        yield


def pacer(tiles: int, asked: Barrier, granted: Barrier, counted: list[int]) -> Iterator[None]:
    """Yield wherever the other side may go on; `counted` gets what it adds to the progress."""
    for ask in range(last_ask_of(tiles) + 1):
        begun = tiles - (last_ask_of(tiles) - ask) * ASK_TILES
        while not asked.passes(ask % 2):
            yield
        if ask < FREE_ASKS:
            granted.arrive()
        yield
        counted.append(min(begun, ASK_TILES))
        if ask >= FREE_ASKS:
            yield
            granted.arrive()
        yield


@pytest.mark.parametrize("tiles", [*range(1, 20), 64, 127])
def test_both_sides_end_and_count_every_tile(tiles: int) -> None:
    draw = random.Random(tiles)
    for _ in range(50):
        asked, granted, counted, done = Barrier(), Barrier(), [], [0]

        def begun(done: list[int] = done, counted: list[int] = counted) -> None:
            done[0] += 1
            # Leave n is for the tiles behind ask n + 1, and a free one comes before its ask's tiles count.
            assert done[0] <= sum(counted) + 3 * ASK_TILES

        sides = [loader(tiles, asked, granted, begun), pacer(tiles, asked, granted, counted)]
        steps = 0
        while sides:
            side = draw.choice(sides)
            steps += 1
            assert steps < 200 * (tiles + 2), "both wait"
            try:
                next(side)
            except StopIteration:
                sides.remove(side)
        assert done[0] == tiles
        assert sum(counted) == tiles


@given(
    tiles=st.lists(st.integers(0, 100), min_size=1, max_size=132).filter(any),
    launches=st.integers(0, 2**31),
    done=st.floats(0, 1),
)
def test_progress_is_measured_within_a_launch(tiles: list[int], launches: int, done: float) -> None:
    """The counter is not cleared between launches and may wrap: its distance from a launch's start holds."""
    everything = sum(tiles)
    before = launches * everything % 2**32
    now = (before + int(done * everything)) % 2**32
    distance = (now - before) % 2**32
    assert 0 <= distance <= everything
    for own in tiles:
        assert own * distance / everything <= own


def test_the_kernel_asks_as_the_model_does() -> None:
    """The model above is only worth something while the kernel has the lines that it models."""
    source = kernel_source("sm90_latent.cu")
    assert "kAskShift = 1, kAskTiles = 1 << kAskShift, kFreeAsks = 2" in source
    waits = source.index("if (ask > 0) barrier_wait(granted, (ask - 1) & 1);")
    assert waits < source.index("if (speaks) barrier_arrive(asked);"), "a wait behind the ask may hang"
