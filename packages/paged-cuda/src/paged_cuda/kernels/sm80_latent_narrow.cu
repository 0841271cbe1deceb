// Split-KV attention over a paged LATENT cache of narrow rows (V at most 128 channels) on mma.sync, for 16 query rows.
//
// As in sm80_latent.cu a CTA works through one slice with one row tile of 16 packed query rows, and loading warps keep a ring
// of KV tiles filled. But each computing warp takes whole KV tiles for itself, in turn: scores, softmax and the sum of values
// stay in its registers, and nothing is exchanged but the query. At the end of a segment the warps' sums are merged through
// shared memory in warp order. A narrow row is so few bytes that phases shared by all warps cost more than its loads.
// Tile i of a segment belongs to warp i mod CONSUMER_WARPS: sums depend on lengths only, and results repeat bit for bit.
//
// Macros: BF16 HEAD_SIZE V_HEAD_SIZE ROW_TILE KV_TILE STAGES CONSUMER_WARPS PRODUCER_WARPS WEIGHT_TERMS SHARED_BYTES
#include "layout/output.cuh"
#include "layout/row_partial.cuh"
#include "layout/schedule.cuh"
#include "math/partial.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base2.cuh"
#include "ptx/dependency.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"

static_assert(kScaleColumns == 16, "four lanes share a scale");

constexpr int kConsumers = CONSUMER_WARPS * 32, kLoaders = PRODUCER_WARPS * 32, kThreads = kConsumers + kLoaders;

constexpr int kKPadded = (HEAD_SIZE + 63) / 64 * 64 > kVPadded ? (HEAD_SIZE + 63) / 64 * 64 : kVPadded;
constexpr int kRowBytes = kKPadded * 2, kSlabs = kRowBytes / 128, kChunks = HEAD_SIZE / 8;
constexpr int kSteps = kKPadded / 16;                 // k16 steps of QK
constexpr int kScoreTiles = KV_TILE / 8;              // n8 tiles of S
constexpr int kColumnTiles = kVPadded / 16;           // n16 tiles of the output
constexpr int kWarpRows = ROW_TILE / CONSUMER_WARPS;  // output rows that a warp merges

constexpr bool kLeavesRoom = HEAD_SIZE <= 192;        // of registers, for a block of the combine kernel
constexpr int kMergePitch = kVPadded + 8;             // words: 8 mod 32, conflict-free float2 stores
constexpr int kKvOffset = 0;
constexpr int kQueryOffset = kKvOffset + STAGES * KV_TILE * kRowBytes;
constexpr int kMergeOffset = kQueryOffset + ROW_TILE * kRowBytes;
constexpr int kStatisticsOffset = kMergeOffset + CONSUMER_WARPS * ROW_TILE * kMergePitch * 4;   // maximum and sum
constexpr int kMaskOffset = kStatisticsOffset + CONSUMER_WARPS * ROW_TILE * 8;
constexpr int kItemOffset = kMaskOffset + STAGES * KV_TILE * 4;
constexpr int kBarrierOffset = kItemOffset + 32;
constexpr int kSharedBytes = kBarrierOffset + 8 * (2 * STAGES + 2);

static_assert(kSharedBytes == SHARED_BYTES, "the host asks for what the kernel lays out");
static_assert(HEAD_SIZE % 8 == 0 && V_HEAD_SIZE >= 1 && V_HEAD_SIZE <= HEAD_SIZE, "operator limits");
static_assert(ROW_TILE == 16 && kVPadded == 128, "what fits a warp's registers");
static_assert(ROW_TILE % CONSUMER_WARPS == 0, "rows to merge");

#include "sm80/loader.cuh"

// Offset of the j-th pair of 16-byte chunks of a row from its first one, `at` being the swizzled start.
__device__ __forceinline__ u32 step_address(u32 base, u32 at, int j) { return base + (at ^ ((j & 3) << 5)) + (j >> 2) * 128; }

// The state of one warp for 16 rows: a lane holds rows lane / 4 and that plus 8, of the columns 2 * (lane % 4) of every 8.
struct RunningSum {
  float out[kColumnTiles * 2][4], maximum[2], sum[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < kColumnTiles * 2; b++) out[b][0] = out[b][1] = out[b][2] = out[b][3] = 0.f;
    maximum[0] = maximum[1] = kStartMax;
    sum[0] = sum[1] = 0.f;
  }
  // Scores (log2 units, masked) become weights; the sums so far are scaled to the new maximum.
  __device__ __forceinline__ void weigh(float (&s)[kScoreTiles][4]) {
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = maximum[h];
#pragma unroll
      for (int b = 0; b < kScoreTiles; b++) top = fmaxf(top, fmaxf(s[b][2 * h], s[b][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      rescale[h] = exp2_fast(maximum[h] - top);
      maximum[h] = top;
      float total = 0.f;
#pragma unroll
      for (int b = 0; b < kScoreTiles; b++) {
        s[b][2 * h] = exp2_fast(s[b][2 * h] - top);
        s[b][2 * h + 1] = exp2_fast(s[b][2 * h + 1] - top);
        total += s[b][2 * h] + s[b][2 * h + 1];
      }
      sum[h] = sum[h] * rescale[h] + total;
    }
    if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
      for (int b = 0; b < kColumnTiles * 2; b++) {
        out[b][0] *= rescale[0]; out[b][1] *= rescale[0]; out[b][2] *= rescale[1]; out[b][3] *= rescale[1];
      }
    }
  }
  // Adds weights times the tile's values, 16 KV rows at a time: two score tiles are one A operand.
  __device__ __forceinline__ void add(const float (&s)[kScoreTiles][4], u32 value, u32 value_chunk) {
#pragma unroll
    for (int k = 0; k < KV_TILE / 16; k++) {
      u32 weights[WEIGHT_TERMS][4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float x = s[2 * k + (e >> 1)][2 * (e & 1)], y = s[2 * k + (e >> 1)][2 * (e & 1) + 1];
        weights[0][e] = pack_pair(x, y);
        if (WEIGHT_TERMS == 2) {
          const float2 rounded = unpack_pair(weights[0][e]);
          weights[WEIGHT_TERMS - 1][e] = pack_pair(x - rounded.x, y - rounded.y);
        }
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; j++) {
        u32 b[4];
        load_matrix_x4_transposed(b, step_address(value, value_chunk, j) + k * 16 * kRowBytes);
#pragma unroll
        for (int t = 0; t < WEIGHT_TERMS; t++) {
          mma_m16n8k16(out[2 * j], weights[t], b[0], b[1]);
          mma_m16n8k16(out[2 * j + 1], weights[t], b[2], b[3]);
        }
      }
    }
  }
  __device__ __forceinline__ void publish(u32 shared, int warp, int quad_row, int quad_column) {
    const u32 at = shared + kMergeOffset + ((warp * ROW_TILE + quad_row) * kMergePitch + quad_column) * 4;
#pragma unroll
    for (int b = 0; b < kColumnTiles * 2; b++) {
      store_f32x2(at + b * 32, out[b][0], out[b][1]);
      store_f32x2(at + b * 32 + 8 * kMergePitch * 4, out[b][2], out[b][3]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float total = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (quad_column == 0) store_f32x2(shared + kStatisticsOffset + (warp * ROW_TILE + quad_row + 8 * h) * 8, maximum[h], total);
    }
  }
};

// One row of all warps' sums: four columns a lane, divided by the row's sum.
struct MergedRow {
  float4 out;
  float log_sum;   // base 2
  bool empty;

  __device__ __forceinline__ MergedRow(u32 shared, int row, int lane) {
    float2 statistics[CONSUMER_WARPS];
    float top = kStartMax, total = 0.f;
#pragma unroll
    for (int w = 0; w < CONSUMER_WARPS; w++) {
      statistics[w] = load_f32x2(shared + kStatisticsOffset + (w * ROW_TILE + row) * 8);
      top = fmaxf(top, statistics[w].x);
    }
    out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < CONSUMER_WARPS; w++) {
      const float factor = exp2_fast(statistics[w].x - top);
      const float4 v = load_f32x4(shared + kMergeOffset + ((w * ROW_TILE + row) * kMergePitch + lane * 4) * 4);
      total += factor * statistics[w].y;
      out.x += factor * v.x; out.y += factor * v.y; out.z += factor * v.z; out.w += factor * v.w;
    }
    empty = !(total > 0.f);
    const float inverse = empty ? 0.f : 1.f / total;
    out.x *= inverse; out.y *= inverse; out.z *= inverse; out.w *= inverse;
    log_sum = top + log2_fast(total);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) SYMBOL(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int slice = blockIdx.x / p.row_tiles, row_tile = blockIdx.x % p.row_tiles;
  const u32 full = shared + kBarrierOffset, empty = full + 8 * STAGES, query_full = empty + 8 * STAGES, query_empty = query_full + 8;

  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, kStageArrivals);
      barrier_init(empty + 8 * i, 32);
    }
    barrier_init(query_full, kQueryArrivals);
    barrier_init(query_empty, kConsumers);
  }
  // Schedule and block table may be older than the kernel before this one; then they are read while it still runs. Else no later kernel
  // may start, as the next layer's would read them without waiting.
  if (!p.schedule_settled) wait_for_previous_kernels();
  let_next_kernel_start();
  const SliceStart start = p.starts[slice];
  __syncthreads();
  if (start.count == 0) {
    wait_for_previous_kernels();
    if (kLeavesRoom && p.starts[p.slices / 2].count > 0) hold_place();   // where most have nothing to do, there is room enough
    return;
  }
  if (warp >= CONSUMER_WARPS) {
    Loader loader(p, shared, full, tid - kConsumers, start);
    wait_for_previous_kernels();
    produce<true>(loader, empty, query_full, query_empty);
    return;
  }
  // The first query, by the computing warps, which have nothing else to do while the first keys are on their way.
  wait_for_previous_kernels();
  copy_query<kConsumers>(p, shared, start.first, row_tile, tid);
  copy_async_wait_all();
  named_barrier_sync<kConsumers>();

  const int l7 = lane & 7, quad_row = lane >> 2, quad_column = (lane & 3) * 2;
  const u32 key_base = shared + kKvOffset + (l7 + ((lane >> 4) << 3)) * kRowBytes, key_chunk = (((lane >> 3) & 1) ^ l7) << 4;
  const u32 value_base = shared + kKvOffset + (l7 + ((lane >> 3) & 1) * 8) * kRowBytes, value_chunk = ((lane >> 4) ^ l7) << 4;
  const u32 query_base = shared + kQueryOffset + (l7 + ((lane >> 3) & 1) * 8) * kRowBytes;
  const float score_factor = p.softcap > 0.f ? 2.f * kLog2E * p.scale / p.softcap : p.scale * kLog2E;
  const bool vectors = output_takes_vectors(p);
  RunningSum sums;
  u32 query[kSteps][4];
  int left = start.count, ring = 0, query_phase = 0;   // KV tiles to go, tiles before the segment
  bool first_item = true, first_segment = true;
#pragma unroll 1
  while (left > 0) {
    if (!first_item) {
      barrier_wait(query_full, query_phase);
      query_phase ^= 1;
    }
    const int4 a = load_s32x4(shared + kItemOffset), b = load_s32x4(shared + kItemOffset + 16);
#pragma unroll
    for (int j = 0; j < kSteps; j++) load_matrix_x4(query[j], step_address(query_base, value_chunk, j));
    barrier_arrive(query_empty);
    const int row0 = a.x + row_tile * ROW_TILE, rows = a.y - row_tile * ROW_TILE, part = b.z;
    const int row_first = a.w + row_tile * ROW_TILE, row_last = row_first + min(rows, ROW_TILE) - 1;   // rows behind the last are like it
    int visible_from[2], visible_to[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int position = a.z + min(row_first + quad_row + 8 * h, row_last) / p.num_heads;
      visible_from[h] = visible_begin(position, p.local_window_size);
      visible_to[h] = p.causal ? position + 1 : b.x;
    }
    // Between these every row sees every position.
    const int all_from = visible_begin(a.z + row_last / p.num_heads, p.local_window_size);
    const int all_to = p.causal ? a.z + row_first / p.num_heads + 1 : b.x;
    const int tile_first = visible_begin(a.z + a.w / p.num_heads, p.local_window_size) / KV_TILE, tile_end = tile_first + b.y;
    int tile = tile_first + (first_item ? start.offset : 0);
    first_item = false;
#pragma unroll 1
    while (left > 0 && tile < tile_end) {
      int count = min(tile_end - tile, left);
      if (p.chunk) count = min(count, p.chunk - tile % p.chunk);
      sums.clear();
#pragma unroll 1
      for (int i = warp; i < count; i += CONSUMER_WARPS) {
        const int stage = (ring + i) % STAGES;
        barrier_wait(full + 8 * stage, (ring + i) / STAGES & 1);
        const u32 key = key_base + stage * (KV_TILE * kRowBytes);
        float s[kScoreTiles][4];
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
        for (int j = 0; j < kSteps; j++)
#pragma unroll
          for (int n = 0; n < kScoreTiles / 2; n++) {
            u32 k[4];
            load_matrix_x4(k, step_address(key, key_chunk, j) + n * 16 * kRowBytes);
            mma_m16n8k16(s[2 * n], query[j], k[0], k[1]);
            mma_m16n8k16(s[2 * n + 1], query[j], k[2], k[3]);
          }
        const u32 mask = shared + kMaskOffset + (stage * KV_TILE + quad_column) * 4;
        const int first = (tile + i) * KV_TILE;
        const bool inside = first >= all_from && first + KV_TILE <= all_to;
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++) {
          const float2 m = load_f32x2(mask + n * 32);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float y = s[n][e] * score_factor;
            if (p.softcap > 0.f) y = p.softcap * kLog2E * (1.f - 2.f * reciprocal_fast(exp2_fast(y) + 1.f));   // tanh
            s[n][e] = y + (e & 1 ? m.y : m.x);
          }
        }
        if (!inside) {
#pragma unroll
          for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int position = first + n * 8 + quad_column + (e & 1);
              if (position < visible_from[e >> 1] || position >= visible_to[e >> 1]) s[n][e] = kMasked;
            }
        }
        sums.weigh(s);
        sums.add(s, value_base + stage * (KV_TILE * kRowBytes), value_chunk);
        barrier_arrive(empty + 8 * stage);
      }
      sums.publish(shared, warp, quad_row, quad_column);
      named_barrier_sync<kConsumers>();
      const bool whole = tile == tile_first && tile + count == tile_end;
      const i64 slot = p.chunk ? part + tile / p.chunk - tile_first / p.chunk : 2 * slice + (first_segment ? 0 : 1);
#pragma unroll 1   // code that runs once a segment, and is fetched then
      for (int r = 0; r < kWarpRows; r++) {
        const int row = warp * kWarpRows + r;
        const MergedRow merged(shared, row, lane);
        if (!whole) {
          const u64 at = (slot * p.row_tiles + row_tile) * ROW_TILE + row;
          const float values[4] = {merged.out.x, merged.out.y, merged.out.z, merged.out.w};
          float most = 0.f;
#pragma unroll
          for (int e = 0; e < 4; e++)   // columns behind the value's are the key's, and nobody's
            if (V_HEAD_SIZE == kVPadded || lane * 4 + e < V_HEAD_SIZE) most = larger_magnitude(most, values[e]);
          most = largest_of_quad(most);
          const float factor = fixed_factor(most);
          *(uint2*)partial_words(p, at, lane * 4) = make_uint2(pack_fixed(values[0], values[1], factor), pack_fixed(values[2], values[3], factor));
          if (lane % 4 == 0) *partial_facts(p, at, lane / 4) = make_float2(merged.empty ? kStartMax : merged.log_sum, fixed_scale(most));
        } else if (row < rows) {
          store_columns(p.output + packed_row_offset(row0 + row, p.num_heads, p.output_stride, V_HEAD_SIZE) + lane * 4, lane * 4, merged.out, vectors);
          if (p.lse && lane == 0) p.lse[(i64)row0 + row] = merged.empty ? kMinusInfinity : merged.log_sum * kLn2;
        }
      }
      named_barrier_sync<kConsumers>();   // the sums of the next segment may be published
      ring += count;
      tile += count;
      left -= count;
      first_segment = false;
    }
  }
}
