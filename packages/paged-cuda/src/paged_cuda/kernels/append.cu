// Append: rotate every new latent row and write it to its slot; where the path asks for it, rotate the queries too.
//
// Rows without a slot, and tokens that no sequence owns, are left out. A block takes one part of a token at a time: part 0
// is the key's row, the others are kPartChannels of the query's channels each. Reads `key` and `query`, writes
// `key_cache` and `query_rotary`.
// With the schedule at hand it may start beside the kernel before it. It then finds its first token's place, a chain of reads,
// while that one still runs: lengths and tables are older than it. Else everything before is complete when this starts.
#include "layout/cache.cuh"
#include "layout/sequence.cuh"
#include "math/rotary.cuh"
#include "ptx/dependency.cuh"

constexpr int kThreads = 128;
constexpr int kPartChannels = 8 * kThreads;

__device__ __forceinline__ void write_key(const AttentionParams& p, const Token& owner, i64 token, i64 slot) {
  const u16* key = p.key + token * p.key_stride;
  u16* row = p.key_cache + slot_offset(p, slot);
  for (i32 c = threadIdx.x; c < p.head_size; c += kThreads) row[c] = rotary_channel(p, key, c, owner.position);
}

__device__ __forceinline__ void rotate_query(const AttentionParams& p, const Token& owner, i64 token, i32 part) {
  const i32 channels = p.num_heads * p.query_width, end = min(channels, (part + 1) * kPartChannels);
  for (i32 c = part * kPartChannels + threadIdx.x; c < end; c += kThreads) {
    const u16* query = p.query + token * p.query_stride + (i64)(c / p.query_width) * p.head_size;
    p.query_rotary[token * channels + c] = rotary_channel(p, query, p.query_first + c % p.query_width, owner.position);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) SYMBOL(const __grid_constant__ AttentionParams p) {
  let_next_kernel_start();
  const i32 parts = p.query_rotary ? 1 + (p.num_heads * p.query_width + kPartChannels - 1) / kPartChannels : 1;
  for (i64 i = blockIdx.x; i < (i64)p.tokens * parts; i += gridDim.x) {
    const i64 token = i / parts;
    const i32 part = (i32)(i % parts);
    const Token owner = find_token(p, token);
    const i64 slot = part == 0 && owner.sequence >= 0 ? write_slot(p, owner.sequence, owner.position, token, threadIdx.x == 0) : kUnmapped;
    if (i == blockIdx.x) wait_for_previous_kernels();
    if (owner.fault) report(threadIdx.x == 0 && part == 0, p.violations, owner.fault, token, owner.position);
    if (owner.sequence < 0) continue;
    if (part > 0) rotate_query(p, owner, token, part - 1);
    else if (slot != kUnmapped) write_key(p, owner, token, slot);
  }
}
