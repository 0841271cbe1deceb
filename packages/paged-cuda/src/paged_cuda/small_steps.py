"""Steps so small that 16-row tiles on mma.sync are done first, with up to 128 heads.

The memory and the tensor cores are idle for most of such a step. A block of 16 rows leaves room on its
multiprocessor for one of the combine kernel; wgmma leaves at least half of the multiprocessors for that
(`split_plan.Apart`). Which of the two is faster is measured, and not why. The price of low tiles is that each
16 heads read the keys again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_cuda.bounds import Bounds
from paged_cuda.launch_plan import PathOptions
from paged_cuda.split_plan import padded_v_head_size

if TYPE_CHECKING:
    from paged_schema import Call


@dataclass(frozen=True, slots=True)
class SmallSteps:
    """The largest steps that count as small.

    Attributes:
        tokens: New tokens.
        pairs: Tokens times the keys of the longest context, by the most heads that it holds for.
    """

    tokens: int
    pairs: Mapping[int, int]


# By padded value columns: what the records h200-small-sm80.json and h200-small-sm90.json show of a layer and
# of attention alone; a test holds it to them. Where both are within 3 % the step counts as small. Up to 32
# heads the limit is where the measuring ended.
SMALL_STEPS = {
    128: SmallSteps(1, {32: 16_384, 64: 6_144}),
    256: SmallSteps(1, {32: 8_192, 64: 4_096, 128: 1_024}),
    384: SmallSteps(1, {32: 8_192, 64: 4_096}),
    512: SmallSteps(16, {32: 16_384, 64: 4_096, 128: 1_024}),
}


def small_pairs(call: Call, bounds: Bounds, options: PathOptions) -> int | None:
    """Return the limit on tokens times keys if no step inside `bounds` is above it, else None.

    None as well where the caller has fixed a row tile, or a split: bits that do not depend on the batch
    should not depend on the bounds by this.
    """
    steps = SMALL_STEPS.get(padded_v_head_size(call.v_head_size or 0))
    if steps is None or options.row_tile is not None or options.split_rows:
        return None
    limit = next((pairs for heads, pairs in steps.pairs.items() if call.num_heads <= heads), 0)
    fits = bounds.max_tokens <= steps.tokens and bounds.max_tokens * bounds.max_context <= limit
    return limit if fits else None
