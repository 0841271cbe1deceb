"""The schedule's rule, modelled: every tile of every item is worked on once, and every partial is merged.

`plan` says in Python what `kernels/schedule.cu` computes on the device and what the attend kernels make of
it. Where one of them changes, so must the other; the GPU tests hold the kernels to the oracle.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from paged_cuda.sources import ROOT

MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class Config:
    """What bounds and node fix."""

    heads: int = 16
    row_tile: int = 64
    kv_tile: int = 32
    slices: int = 132
    min_tiles: int = 4
    item_cost: int = 9
    slow_tiles: int = 31
    slow_cost: int = 6
    chunk: int = 0
    window: int = -1
    causal: bool = True
    max_positions: int = 2**30
    tokens: int = 2


@dataclass
class Item:
    """A group of query rows that share a range of keys: `begin` is its first tile."""

    row0: int
    begin: int
    tiles: int
    part: int = 0
    own_parts: int = 0


@dataclass(frozen=True)
class Split:
    """A cut item, as the combine kernel is told of it."""

    parts: int
    slot: int
    adjust: int


def items_of(config: Config, starts: Sequence[int], pasts: Sequence[int]) -> list[Item]:
    """Return the items of every request in order."""
    found = []
    step = max(config.heads, config.row_tile)
    for request, past in enumerate(pasts):
        begin, end = starts[request], starts[request + 1]
        rows = (end - begin) * config.heads
        for first in range(0, rows, step):
            last = min(first + step, rows) - 1
            kv_end = past + last // config.heads + 1 if config.causal else past + end - begin
            kv_end = min(kv_end, config.max_positions)
            position = past + first // config.heads
            visible = max(0, position - config.window + 1) if config.window > 0 else 0
            tile = visible // config.kv_tile
            tiles = max(1, (kv_end - 1) // config.kv_tile + 1 - tile)
            found.append(Item(begin * config.heads + first, tile, tiles))
    return found


def last_at_or_before(begins: Sequence[int], x: int) -> int:
    """Return the index of the last begin that is at most x."""
    return max(0, bisect.bisect_right(begins, x) - 1)


def tile_cost(config: Config, tiles: int) -> int:
    """Return what a tile of an item with so many of them costs, in thirds of one."""
    return config.slow_cost if tiles <= config.slow_tiles else 3


def cost(config: Config, item: Item) -> int:
    """Return what an item costs: thirds of tiles, or whole ones under a fixed split."""
    return item.tiles if config.chunk else config.item_cost + item.tiles * tile_cost(config, item.tiles)


def cuts_of(config: Config, items: list[Item], begins: list[int], total: int) -> list[tuple[int, int, int]]:
    """Return (item, tiles into it, tiles before it all) of every slice's start, and of the end."""
    longest, shortest = max(i.tiles for i in items), min(i.tiles for i in items)
    costs = [cost(config, item) for item in items]
    cost_begins, end = list(itertools.accumulate(costs, initial=0))[:-1], sum(costs)
    least = config.min_tiles if config.chunk else config.item_cost + 3 * config.min_tiles
    payload, length, pieces = max(least, -(-end // config.slices)), 0, 0
    if longest == shortest and not config.chunk:
        share = max(config.min_tiles, -(-total // config.slices))
        parts, most = longest // share, -(-longest // share)
        pieces_fit = len(items) * most <= config.slices and -(-longest // most) >= config.min_tiles
        if pieces_fit and parts >= 2:
            parts = most
        snapped = -(-longest // parts) if parts else -(-share // longest) * longest
        if snapped - share <= share // 16:
            payload, length, pieces, end = snapped, longest, parts, total
    found = []
    for s in range(config.slices + 1):
        if s == config.slices:
            position = end
        elif pieces:
            item = s // pieces
            position = min(item * longest + min((s - item * pieces) * payload, longest), end)
        else:
            position = min(s * payload, end)
        i, offset, at = len(items), 0, total
        if position < end and length:
            i, offset, at = position // length, position % length, position
        elif position < end:
            i = last_at_or_before(cost_begins, position)
            offset, tiles = position - cost_begins[i], items[i].tiles
            if not config.chunk:
                offset = max(0, offset - config.item_cost) // tile_cost(config, tiles)
                near_end = tiles - offset < config.min_tiles
                offset = 0 if offset < config.min_tiles else tiles if near_end else offset
            elif offset:
                first = items[i].begin
                offset = min(-(-(first + offset) // config.chunk) * config.chunk - first, tiles)
            at = begins[i] + offset
            if offset == tiles:
                i, offset = i + 1, 0
        found.append((i, offset, at))
    return found


def plan(config: Config, starts: Sequence[int], pasts: Sequence[int]) -> int:
    """Build the schedule, walk it as the attend kernels do, and return how many tiles were worked on.

    Raises:
        AssertionError: A tile is worked on twice or never, or a partial is not the one that is merged.
    """
    items = items_of(config, starts, pasts)
    if not items:
        return 0
    begins, total, parts = [], 0, 0
    for item in items:
        begins.append(total)
        total += item.tiles
        if config.chunk:
            last = (item.begin + item.tiles - 1) // config.chunk
            own = last - item.begin // config.chunk + 1
            item.part, item.own_parts = parts, own if own > 1 else 0
            parts += item.own_parts
    cuts = cuts_of(config, items, begins, total)
    for (_, _, here), (_, _, there) in itertools.pairwise(cuts):
        assert here <= there, "a slice ends before it starts"
    splits = {k: Split(item.own_parts, item.part, 0) for k, item in enumerate(items) if item.own_parts}
    if not config.chunk:
        firsts = [item for item, _, _ in cuts]
        for s, (k, offset, _) in enumerate(cuts):
            if offset > 0 and not (cuts[s - 1][0] == k and cuts[s - 1][1] > 0):
                last = max(i for i, first in enumerate(firsts[: config.slices]) if first <= k)
                splits[k] = Split(last - s + 2, 2 * (s - 1), int(cuts[s - 1][2] != begins[k]))
    worked = walk(config, items, cuts)
    for k, item in enumerate(items):
        fragments = worked.get(k, [])
        assert fragments, "an item that nobody works on"
        assert fragments[0][0] == item.begin
        assert fragments[-1][1] == item.begin + item.tiles
        assert all(a[1] == b[0] for a, b in itertools.pairwise(fragments))
        slots = [slot for _, _, slot in fragments]
        if len(fragments) == 1:
            assert slots == [None]
            assert k not in splits
            continue
        split, step = splits[k], 1 if config.chunk else 2
        assert slots == [split.slot + p * step + (split.adjust if p == 0 else 0) for p in range(split.parts)]
    return sum(end - first for fragments in worked.values() for first, end, _ in fragments)


def walk(
    config: Config, items: list[Item], cuts: list[tuple[int, int, int]]
) -> dict[int, list[tuple[int, int, int | None]]]:
    """Return what is worked on of each item: (first tile, end, slot of the partial), in slice order."""
    worked: dict[int, list[tuple[int, int, int | None]]] = {}
    for s in range(config.slices):
        k, offset, at = cuts[s]
        left = cuts[s + 1][2] - at
        tile = items[k].begin + offset if left else 0
        first_fragment = True
        while left > 0:
            item = items[k]
            end = item.begin + item.tiles
            stop = min(end, tile + left)
            if config.chunk:
                stop = min(stop, tile - tile % config.chunk + config.chunk)
            slot: int | None = None
            if (tile, stop) != (item.begin, end):
                chunked = item.part + (
                    tile // config.chunk - item.begin // config.chunk if config.chunk else 0
                )
                slot = chunked if config.chunk else 2 * s + (0 if first_fragment else 1)
            worked.setdefault(k, []).append((tile, stop, slot))
            left -= stop - tile
            tile, first_fragment = stop, False
            if left and tile == end:
                k += 1
                tile = items[k].begin
    return worked


@pytest.mark.parametrize("context", [31_681, 31_762, 32_000, 32_257, 33_000, 64_000, 120_000])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6])
def test_equal_items_whose_last_piece_is_short(batch: int, context: int) -> None:
    """A payload rounded up to pieces once put an item's last cut into the next item."""
    for config in (Config(tokens=batch), Config(heads=128, slices=66, tokens=batch), Config(kv_tile=64)):
        worked = plan(config, list(range(batch + 1)), [context - 1] * batch)
        assert worked == batch * -(-context // config.kv_tile)


def test_random_steps_are_worked_on_once() -> None:
    draw = random.Random(5)
    for _ in range(1_500):
        heads, row_tile = draw.choice([1, 3, 12, 16, 17, 63, 64, 65, 96, 128]), draw.choice([16, 32, 64])
        kv_tile = draw.choice([16, 32, 64])
        batch, longest = draw.choice([1, 2, 3, 5, 9]), draw.choice([10, 100, 3_000, 40_000])
        queries = (
            [1] * batch if draw.random() < 0.5 else [draw.choice([0, 1, 2, 5, 12]) for _ in range(batch)]
        )
        starts = [sum(queries[:k]) for k in range(batch + 1)]
        same = draw.randrange(longest)
        pasts = [same if draw.random() < 0.6 else draw.randrange(longest) for _ in queries]
        config = Config(
            heads,
            row_tile,
            kv_tile,
            slices=max(1, draw.choice([4, 33, 132]) // -(-heads // row_tile)),
            min_tiles=max(1, draw.choice([64, 128]) // kv_tile),
            item_cost=3 * draw.choice([64, 96, 192]) // kv_tile,
            slow_tiles=draw.choice([0, 1023 // kv_tile, MAX_INT]),
            slow_cost=draw.choice([3, 5, 6]),
            chunk=draw.choice([0, 0, 8, 32]),
            window=draw.choice([-1, -1, 1, 16, 100, 1_000]),
            causal=draw.random() < 0.8,
            max_positions=draw.choice([2**30, 64, 0]),
            tokens=starts[-1],
        )
        assert plan(config, starts, pasts) >= sum(count > 0 for count in queries)


@pytest.mark.parametrize(("heads", "slices"), [(16, 132), (64, 132), (128, 66)])
def test_a_prefill_is_shared_out_by_cost(heads: int, slices: int) -> None:
    """Its first slices hold many short items; shares of tiles alone would let them end last."""
    config = Config(heads=heads, slices=slices, tokens=4096)
    items = items_of(config, [0, 4096], [0])
    begins = list(itertools.accumulate((item.tiles for item in items), initial=0))[:-1]
    cuts = cuts_of(config, items, begins, sum(item.tiles for item in items))
    worked, spent = walk(config, items, cuts), [0] * slices
    for (k, offset, _), (end, _, _), s in zip(cuts, cuts[1:], range(slices), strict=False):
        for i in range(k, min(end + 1, len(items))):
            spent[s] += sum(
                config.item_cost + (stop - tile) * tile_cost(config, items[i].tiles)
                for tile, stop, _ in worked[i]
                if (i, tile - items[i].begin) >= (k, offset) and (i, tile - items[i].begin) < cuts[s + 1][:2]
            )
    assert sum(spent) >= sum(cost(config, item) for item in items)
    assert max(spent) <= 1.15 * sum(spent) / slices


def pieces_of(config: Config, batch: int, tiles: int) -> list[int]:
    """Return the tiles of each slice of a decode whose requests have so many tiles each."""
    items = items_of(config, list(range(batch + 1)), [tiles * config.kv_tile - 1] * batch)
    cuts = cuts_of(config, items, [n * tiles for n in range(batch)], batch * tiles)
    return [b - a for (_, _, a), (_, _, b) in itertools.pairwise(cuts) if b > a]


def test_equal_items_are_cut_alike_where_there_is_a_slice_for_each_piece() -> None:
    small = Config(heads=64, slices=66, min_tiles=2, item_cost=12)
    assert pieces_of(small, 1, 157) == [3] * 52 + [1]
    assert pieces_of(small, 3, 16) == [2] * 24
    assert pieces_of(replace(small, slices=33), 3, 32) == ([3] * 10 + [2]) * 3
    assert pieces_of(Config(heads=16), 2, 1001) == ([16] * 62 + [9]) * 2
    assert max(pieces_of(replace(small, slices=10), 4, 9)) == 5  # by cost: twelve pieces are too many


@pytest.mark.parametrize("tiles", [5, 6, 7])
def test_a_piece_is_not_shorter_than_a_slice_but_for_the_last_of_many(tiles: int) -> None:
    """An item of less than two slices is not cut, nor are all pieces made too short for one more."""
    assert pieces_of(Config(heads=64), 40, tiles) == [tiles] * 40
    assert min(pieces_of(Config(heads=64), 1, 9)[:-1]) >= 4


def test_the_kernel_has_the_lines_that_the_model_is_of() -> None:
    source = Path(ROOT / "schedule.cu").read_text(encoding="utf-8")
    assert "min((i64)(s - item * c.pieces) * c.payload, (i64)c.length)" in source
    assert "longest / 2 >= payload && piece >= p.min_tiles &&" in source
    assert (
        "(i64)((u32)tiles / (u32)longest) * enough <= p.slices) return {piece, tiles, longest, enough};"
        in source
    )
    assert "enough = (u32)(longest + payload - 1) / (u32)payload" in source
    assert "piece = (u32)(longest + enough - 1) / (u32)enough;" in source
