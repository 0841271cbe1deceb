"""What changes no number, so that no comparison sees it: cache policies, who stays, who is kept level.

Only time on a GPU shows whether they are right (`docs/measurements/h200-sm90-log.md`, runs 16 and 17). Here
they are held to what was measured.
"""

from __future__ import annotations

import pytest
from paged_cuda.sources import kernel_source

IDLE_BLOCKS_HOLD_THEIR_PLACE_BESIDE_WHICH_COMBINE_FITS = (
    ("sm80_latent.cu", "if (ROW_TILE == 16 && p.starts[p.slices / 2].count > 0) hold_place();"),
    ("sm80_latent_narrow.cu", "    if (kLeavesRoom && p.starts[p.slices / 2].count > 0) hold_place();"),
    ("sm80_latent_narrow.cu", "constexpr bool kLeavesRoom = HEAD_SIZE <= 192;"),
    ("sm80_latent.cu", '#if __CUDA_ARCH__ == 900\n  asm volatile("nanosleep.u32 2000;"'),
)
KEYS_LEAVE_OR_HAVE_NO_POLICY = (
    ("sm80_latent.cu", "constexpr bool kKeysLeave = ROW_TILE == 16 && __CUDA_ARCH__ == 900;"),
    ("sm80_latent.cu", "if (kKeysLeave) copy_async_16(destination + s * 128, from, bytes, policy);"),
    ("sm80_latent.cu", "else copy_async_16(destination + s * 128, from, bytes);"),
    ("sm90_latent.cu", "constexpr bool kKeysLeave = kVPadded < 512;"),
    (
        "sm90_latent.cu",
        "if (kKeysLeave && paced) copy_box(to, maps.key_cache, shared.full(ring.stage), slab * 64, y, 0,"
        " page, policy);",
    ),
    ("sm90_latent.cu", "else copy_box(to, maps.key_cache, shared.full(ring.stage), slab * 64, y, 0, page);"),
    ("sm90_latent.cu", "  return stays ? last : usual;"),
    ("sm90_latent.cu", 'createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(goes)'),
    ("sm90_latent.cu", 'createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last)'),
    ("sm90_latent.cu", 'createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(usual)'),
)
# Under a fixed split there may be any number of partials, and of a prefill's outputs.
WHAT_IS_LITTLE_STAYS = (
    ("sm90_latent.cu", "staying_if(p.chunk == 0)"),
    ("sm90_latent.cu", "kStayingTiles = 4096 / KV_TILE, kStayingRows = (1 << 24) / (2 * kVPadded);"),
    (
        "sm90_latent.cu",
        "p.row_tiles == 1 && Shared::word(fragment, kItemTiles) <= kStayingTiles"
        " && (i64)p.tokens * p.num_heads <= kStayingRows;",
    ),
)
KEYS_ARE_ASKED_FOR_EARLY = (
    ("sm90_latent.cu", "else if (warp == 15 && p.schedule_settled && blockIdx.x == 0) prefetch_keys("),
    ("sm90_latent.cu", "constexpr int kEarlyRows = 64;"),
    (
        "sm90_latent.cu",
        "if (p.row_stride == HEAD_SIZE && position < end && entry >> 5 == walk.chunk_of(walk.tile)"
        " && (u32)page < (u32)p.num_blocks)",
    ),
    (
        "sm90_latent.cu",
        "min(min(walk.tile_end, walk.tile + walk.left) * KV_TILE, min(begin + kEarlyRows, walk.kv_end()))",
    ),
    (
        "sm90_latent.cu",
        "(position & ((1 << p.block_shift) - 1)) * HEAD_SIZE, min(run, end - position) * HEAD_SIZE * 2);",
    ),
)
BLOCKS_WAIT_A_LITTLE_BEHIND_LEVEL_BUT_NOT_FOR_EACH_OTHER = (("sm90_latent.cu", "kFewTiles = 0.25f"),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *IDLE_BLOCKS_HOLD_THEIR_PLACE_BESIDE_WHICH_COMBINE_FITS,
        *KEYS_LEAVE_OR_HAVE_NO_POLICY,
        *WHAT_IS_LITTLE_STAYS,
        *KEYS_ARE_ASKED_FOR_EARLY,
        *BLOCKS_WAIT_A_LITTLE_BEHIND_LEVEL_BUT_NOT_FOR_EACH_OTHER,
    ],
)
def test_a_kernel_says_what_was_measured(name: str, text: str) -> None:
    assert text in kernel_source(name)
