"""What changes no number, so that no comparison sees it: cache policies, who stays, who is kept level.

Only time on a GPU shows whether they are right (`docs/measurements/h200-sm90-log.md`, run 16). Here they are
held to what was measured.
"""

from __future__ import annotations

import pytest
from paged_cuda.sources import kernel_source

IDLE_BLOCKS_HOLD_THEIR_PLACE_BESIDE_WHICH_COMBINE_FITS = (
    ("sm80_latent.cu", "if (ROW_TILE == 16 && p.starts[p.slices / 2].count > 0) hold_place();"),
    ("sm80_latent_narrow.cu", "    if (p.starts[p.slices / 2].count > 0) hold_place();"),
    ("sm80_latent.cu", '#if __CUDA_ARCH__ == 900\n  asm volatile("nanosleep.u32 2000;"'),
)
KEYS_LEAVE_WHERE_ONE_ROW_TILE_READS_THEM = (
    ("sm80_latent.cu", "key_policy(params.evict_keys_first && one_tile_reads(params, ROW_TILE))"),
    ("sm80_latent.cu", "if (PRODUCER_WARPS > 0) copy_async_16(destination + s * 128, from"),
    ("sm90_latent.cu", "key_policy(p.evict_keys_first && paced)"),
    ("sm90_latent.cu", "0, page, policy);"),
    ("sm90_latent.cu", "return first ? goes : usual;"),
)
# Under a fixed split there may be any number of them.
PARTIALS_STAY_WHERE_THE_SCHEDULE_BOUNDS_THEM = (("sm90_latent.cu", "partial_policy(p.chunk == 0)"),)
BLOCKS_WAIT_A_LITTLE_BEHIND_LEVEL_BUT_NOT_FOR_EACH_OTHER = (("sm90_latent.cu", "kFewTiles = 0.25f"),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *IDLE_BLOCKS_HOLD_THEIR_PLACE_BESIDE_WHICH_COMBINE_FITS,
        *KEYS_LEAVE_WHERE_ONE_ROW_TILE_READS_THEM,
        *PARTIALS_STAY_WHERE_THE_SCHEDULE_BOUNDS_THEM,
        *BLOCKS_WAIT_A_LITTLE_BEHIND_LEVEL_BUT_NOT_FOR_EACH_OTHER,
    ],
)
def test_a_kernel_says_what_was_measured(name: str, text: str) -> None:
    assert text in kernel_source(name)
