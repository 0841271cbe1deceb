"""A cache in which every slot holds a digest of the tokens up to its position.

Write and read it only through index plans, copies and swaps. Then a row that ever reads a slot that does
not hold its own history has read somebody else's tokens, whatever the authority's books say. Legitimately
shared pages agree, because equal histories have equal digests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_kv.block_table import PAD
from paged_kv.copy_plan import CopyPlan
from paged_kv.index_plan import SLOT_SKIP, PagedIndexPlan
from paged_kv.swap import SwapPlan

MODULUS = 2**61 - 1
MULTIPLIER = 1_000_003
NEVER_WRITTEN = -1


def history_of(tokens: Sequence[int]) -> list[int]:
    """One digest a position: of all tokens up to and including it."""
    digests, digest = [], 7
    for token in tokens:
        digest = (digest * MULTIPLIER + token + 1) % MODULUS
        digests.append(digest)
    return digests


class HistoryCache:
    """Slots on the device and on the host, each holding a history digest."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.device = np.full((num_blocks, block_size), NEVER_WRITTEN, dtype=np.int64)
        self.host = np.full((host_blocks, block_size), NEVER_WRITTEN, dtype=np.int64)

    def copy(self, copies: CopyPlan | None) -> None:
        """Carry out a step's copies; must come before `write`."""
        if copies is not None:
            copies.apply(self.device)

    def swap(self, plan: SwapPlan) -> None:
        """Carry out a swap."""
        if plan.to_host:
            self.host[plan.host_pages] = self.device[plan.device_pages]
        else:
            self.device[plan.device_pages] = self.host[plan.host_pages]

    def write(self, plan: PagedIndexPlan, tokens: Sequence[Sequence[int]]) -> None:
        """Store the query tokens of every row; `tokens[i]` are all tokens of batch row i, the query last."""
        flat = self.device.reshape(-1)
        for row, start in enumerate(plan.cumulative_sequence_length[:-1]):
            stop = plan.cumulative_sequence_length[row + 1]
            history = history_of(tokens[row])[int(plan.past_seqlens[row]) :]
            for slot, digest in zip(plan.slot_mapping[start:stop], history, strict=True):
                if slot != SLOT_SKIP:
                    flat[slot] = digest

    def mismatch(
        self, plan: PagedIndexPlan, tokens: Sequence[Sequence[int]], windows: Sequence[int]
    ) -> tuple[int, int] | None:
        """The first (batch row, position) that a kernel would read and that is not the row's own, or None.

        A row with a window of w tokens reads, for each query position p, the positions after p - w.
        """
        for row, context in enumerate(plan.context_lens):
            past, history = int(plan.past_seqlens[row]), history_of(tokens[row])
            first = max(0, past - windows[row] + 1) if windows[row] else 0
            for position in range(first, int(context)):
                page = int(plan.block_table[row, position // self.block_size])
                if page == PAD or self.read(page, position % self.block_size) != history[position]:
                    return row, position
        return None

    def read(self, page: int, offset: int) -> int:
        """The digest in one slot."""
        return int(self.device[page, offset])
