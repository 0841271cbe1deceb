// Append: rotate every new latent row and write it to its slot. One block takes a token at a time.
//
// Rows without a slot, and tokens that no sequence owns, are left out. Reads `key`, writes `key_cache`.
#include "layout/cache.cuh"
#include "layout/sequence.cuh"
#include "math/rotary.cuh"

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads, 2) SYMBOL(const __grid_constant__ AttentionParams p) {
  for (i64 token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const Token owner = find_token(p, token);
    if (owner.fault) report(threadIdx.x == 0, p.violations, owner.fault, token, owner.position);
    if (owner.sequence < 0) continue;
    const i64 slot = write_slot(p, owner.sequence, owner.position, token, threadIdx.x == 0);
    if (slot == kUnmapped) continue;
    const u16* key = p.key + token * p.key_stride;
    u16* row = p.key_cache + slot_offset(p, slot);
    for (i32 c = threadIdx.x; c < p.head_size; c += kThreads) row[c] = rotary_channel(p, key, c, owner.position);
  }
}
