// Baseline attend: the slow, obvious, complete LATENT kernel, and the second opinion on every faster one.
//
// One block computes one (token, head) at a time: a tile of keys, their logits, an online softmax, the weighted
// sum of values, all in float32, rounded once. It serves every head count, head size and mask. A masked key is
// never read, so whatever lies in dead cache rows cannot reach the output. Every sum has a fixed order.
#include "layout/cache.cuh"
#include "layout/sequence.cuh"
#include "math/rotary.cuh"
#include "math/softmax.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kKeyTile = 64;

struct __align__(16) Chunk {  // eight channels in one load
  u32 pair[4];
};

struct Shared {
  float* query;        // head_size, rotated
  float* accumulator;  // v_head_size
  float* weight;       // kKeyTile: logits, then softmax weights
  i64* offset;         // kKeyTile: cache offset of each key's row, kUnmapped where masked
};

__device__ __forceinline__ Shared carve(const AttentionParams& p, u8* memory) {
  i64* offset = (i64*)memory;
  float* weight = (float*)(offset + kKeyTile);
  return {weight + kKeyTile, weight + kKeyTile + p.head_size, weight, offset};
}

__device__ __forceinline__ void load_query(const AttentionParams& p, const Shared& s, i64 token, i32 head, i64 position) {
  const u16* row = p.query + token * p.query_stride + (i64)head * p.head_size;
  for (i32 c = threadIdx.x; c < p.head_size; c += kThreads) s.query[c] = widen(rotary_channel(p, row, c, position));
  for (i32 c = threadIdx.x; c < p.v_head_size; c += kThreads) s.accumulator[c] = 0.0f;
}

__device__ __forceinline__ void find_rows(const AttentionParams& p, const Shared& s, const Token& owner, i64 token,
                                          i64 first, i64 end, bool reporter) {
  if (threadIdx.x >= kKeyTile) return;
  const i64 position = first + threadIdx.x;
  const i64 slot = position < end ? table_slot(p, owner.sequence, position, token, reporter) : kUnmapped;
  s.offset[threadIdx.x] = slot == kUnmapped ? kUnmapped : slot_offset(p, slot);
}

// One warp takes a key; its lanes share the channels.
__device__ __forceinline__ void compute_logits(const AttentionParams& p, const Shared& s) {
  const int lane = threadIdx.x % 32;
  for (int k = threadIdx.x / 32; k < kKeyTile; k += kWarps) {
    float dot = 0.0f;
    if (s.offset[k] != kUnmapped) {
      const Chunk* row = (const Chunk*)(p.key_cache + s.offset[k]);
      for (i32 c = lane; c < p.head_size / 8; c += 32) {
        const Chunk chunk = row[c];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          dot += s.query[8 * c + 2 * i] * widen((u16)chunk.pair[i]);
          dot += s.query[8 * c + 2 * i + 1] * widen((u16)(chunk.pair[i] >> 16));
        }
      }
    }
    dot = warp_sum(dot);
    if (lane == 0) s.weight[k] = s.offset[k] == kUnmapped ? kMinusInfinity : logit(dot, p.scale, p.softcap);
  }
}

// One thread takes a channel.
__device__ __forceinline__ void accumulate_values(const AttentionParams& p, const Shared& s, float rescale) {
  for (i32 c = threadIdx.x; c < p.v_head_size; c += kThreads) {
    float sum = s.accumulator[c] * rescale;
    for (int k = 0; k < kKeyTile; k++)
      if (s.offset[k] != kUnmapped) sum += s.weight[k] * widen(p.key_cache[s.offset[k] + c]);
    s.accumulator[c] = sum;
  }
}

// Rows without a visible key are zero, and their log-sum-exp is minus infinity.
__device__ __forceinline__ void store(const AttentionParams& p, const Shared& s, i64 token, i32 head, float maximum,
                                      float total) {
  u16* row = p.output + token * p.output_stride + (i64)head * p.v_head_size;
  for (i32 c = threadIdx.x; c < p.v_head_size; c += kThreads)
    row[c] = total == 0.0f ? (u16)0 : narrow(s.accumulator[c] / total);
  if (p.lse && threadIdx.x == 0)
    p.lse[token * p.num_heads + head] = total == 0.0f ? kMinusInfinity : maximum + logf(total);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) SYMBOL(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) u8 memory[];
  const Shared s = carve(p, memory);
  const int lane = threadIdx.x % 32;
  for (i64 item = blockIdx.x; item < (i64)p.tokens * p.num_heads; item += gridDim.x) {
    const i64 token = item / p.num_heads;
    const i32 head = (i32)(item % p.num_heads);
    const Token owner = find_token(p, token);
    float maximum = kMinusInfinity, total = 0.0f;
    if (owner.sequence >= 0) {
      const KeyRange keys = visible_keys(p, owner);
      load_query(p, s, token, head, owner.position);
      for (i64 first = keys.begin; first < keys.end; first += kKeyTile) {
        find_rows(p, s, owner, token, first, keys.end, head == 0);
        __syncthreads();
        compute_logits(p, s);
        __syncthreads();
        const float low = s.weight[lane], high = s.weight[lane + 32];
        const float next = fmaxf(maximum, warp_max(fmaxf(low, high)));
        const float low_weight = weight_of(low, next), high_weight = weight_of(high, next);
        const float rescale = weight_of(maximum, next);
        total = total * rescale + warp_sum(low_weight + high_weight);
        maximum = next;
        __syncthreads();
        if (threadIdx.x < 32) {
          s.weight[lane] = low_weight;
          s.weight[lane + 32] = high_weight;
        }
        __syncthreads();
        accumulate_values(p, s, rescale);
        __syncthreads();
      }
    }
    store(p, s, token, head, maximum, total);
    __syncthreads();
  }
}
