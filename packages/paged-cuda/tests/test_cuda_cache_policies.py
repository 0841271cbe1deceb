"""What changes no number, so that no comparison sees it: cache policies, who stays, who is kept level.

Only time on a GPU shows whether they are right (`docs/measurements/h200-sm90-log.md`, run 16). Here they are
held to what was measured.
"""

from __future__ import annotations

import pytest
from paged_cuda.sources import kernel_source


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sm80_latent.cu", "if (ROW_TILE == 16 && p.starts[p.slices / 2].count > 0) hold_place();"),
        ("sm80_latent_narrow.cu", "    if (p.starts[p.slices / 2].count > 0) hold_place();"),
        ("sm80_latent.cu", '#if __CUDA_ARCH__ == 900\n  asm volatile("nanosleep.u32 2000;"'),
    ],
)
def test_idle_blocks_hold_their_place_beside_which_combine_fits(name: str, text: str) -> None:
    assert text in kernel_source(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sm80_latent.cu", "key_policy(params.evict_keys_first && one_tile_reads(params, ROW_TILE))"),
        ("sm80_latent.cu", "if (PRODUCER_WARPS > 0) copy_async_16(destination + s * 128, from"),
        ("sm90_latent.cu", "key_policy(p.evict_keys_first && paced)"),
        ("sm90_latent.cu", "0, page, policy);"),
        ("sm90_latent.cu", "return first ? goes : usual;"),
    ],
)
def test_keys_leave_where_one_row_tile_reads_them(name: str, text: str) -> None:
    assert text in kernel_source(name)


def test_partials_stay_where_the_schedule_bounds_them() -> None:
    """Under a fixed split there may be any number of them."""
    assert "partial_policy(p.chunk == 0)" in kernel_source("sm90_latent.cu")


def test_blocks_wait_a_little_behind_level_but_not_for_each_other() -> None:
    assert "kFewTiles = 0.25f" in kernel_source("sm90_latent.cu")
