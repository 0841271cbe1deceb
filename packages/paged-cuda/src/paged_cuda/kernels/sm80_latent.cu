// Split-KV attention over a paged LATENT cache on mma.sync (sm_80 and later).
//
// One CTA works through one slice of the schedule with one row tile: ROW_TILE packed query rows against the KV rows of an
// item.  A KV row (HEAD_SIZE channels; V is its first V_HEAD_SIZE) is read from global memory once per row tile and used
// from shared memory for both products.  The grid depends on bounds only; every length is read on the device.
//
// A ring of STAGES load tiles of KV_TILE rows with full/empty mbarriers.  With PRODUCER_WARPS > 0 those warps do nothing
// but cp.async (they are the ones that stall when the memory system is full); with 0 the consumers load, which leaves
// them 255 registers for tall row tiles.  The consumers work on 8 / K_SPLIT load tiles at a time, as their phases are bound by
// latency and not by throughput:
//   QK       column group g takes load tile g, warp k of the group every K_SPLIT-th k16 step of the reduction, so every
//            byte of K is read once; float32 partials of S go to shared memory
//   -- barrier --
//   softmax  each warp owns whole rows: adds the partials in fixed order, masks, maximum by shuffles, writes P and
//            the row's rescale factor
//   -- barrier --
//   PV       each warp owns V_HEAD_SIZE / 8 output columns of all rows: every byte of V is read once (ldmatrix.trans)
// WEIGHT_TERMS 2 keeps what rounding P to 16 bits leaves over as a second 16-bit term, so that the products with V are as
// good as float32 weights would make them; with 1 the error is that of FlashAttention's kernels.
// All sums have a fixed order and split points depend on lengths only: results repeat bit for bit.
//
// Macros: BF16 HEAD_SIZE V_HEAD_SIZE ROW_TILE KV_TILE STAGES K_SPLIT PRODUCER_WARPS CTAS_PER_SM
//         REGISTERS WEIGHT_TERMS SHARED_BYTES
#include "layout/output.cuh"
#include "layout/row_partial.cuh"
#include "layout/schedule.cuh"
#include "math/partial.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base2.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/dependency.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"

constexpr int kConsumerWarps = 8, kKSplit = K_SPLIT, kGroups = kConsumerWarps / kKSplit;
constexpr int kConsumers = kConsumerWarps * 32, kProducers = PRODUCER_WARPS * 32;
constexpr int kThreads = kConsumers + kProducers;
constexpr bool kSelfLoading = PRODUCER_WARPS == 0;
constexpr int kLoaders = kSelfLoading ? kConsumers : kProducers;

// Rows in shared memory: whole 128-byte slabs, so that the XOR swizzle never leaves the row and needs no padding.
constexpr int kKPadded = (HEAD_SIZE + 63) / 64 * 64 > kVPadded ? (HEAD_SIZE + 63) / 64 * 64 : kVPadded;
constexpr int kRowBytes = kKPadded * 2, kSlabs = kRowBytes / 128, kChunks = HEAD_SIZE / 8;

constexpr int kRowTiles16 = ROW_TILE / 16;
constexpr int kComputeTile = KV_TILE * kGroups;       // one load tile a column group
constexpr int kScoreTiles = KV_TILE / 8;              // n8 tiles of S a warp
constexpr int kSteps = kKPadded / 16 / kKSplit;       // k16 steps a warp
constexpr int kWarpColumns = kVPadded / kConsumerWarps, kColumnTiles = kWarpColumns / 16;
constexpr int kWarpRows = ROW_TILE / kConsumerWarps;
constexpr int kLanesPerRow = (kWarpRows == 2 ? 16 : kWarpRows == 4 ? 8 : 4) < kComputeTile / 4
                                 ? (kWarpRows == 2 ? 16 : kWarpRows == 4 ? 8 : 4)
                                 : kComputeTile / 4;
constexpr int kLaneColumns = kComputeTile / kLanesPerRow;
constexpr bool kQueryInRegisters = ROW_TILE == 16;

constexpr int kScorePitch = kComputeTile + 8;         // words: 8 mod 32, conflict-free float2 stores
constexpr int kProbabilityPitch = kComputeTile * 2 + 16;   // bytes: an odd number of 16-byte chunks for ldmatrix

constexpr int kKvOffset = 0;
constexpr int kQueryOffset = kKvOffset + STAGES * KV_TILE * kRowBytes;
constexpr int kScoreOffset = kQueryOffset + ROW_TILE * kRowBytes;
constexpr int kProbabilityOffset = kScoreOffset + kKSplit * ROW_TILE * kScorePitch * 4;
constexpr int kRemainderOffset = kProbabilityOffset + ROW_TILE * kProbabilityPitch;
constexpr int kMaskOffset = kProbabilityOffset + WEIGHT_TERMS * ROW_TILE * kProbabilityPitch;
constexpr int kFactorOffset = kMaskOffset + STAGES * KV_TILE * 4;
constexpr int kItemOffset = kFactorOffset + ROW_TILE * 8;
constexpr int kBarrierOffset = kItemOffset + 32;
constexpr int kSharedBytes = kBarrierOffset + 8 * (2 * STAGES + 2);

static_assert(kSharedBytes == SHARED_BYTES, "the host asks for what the kernel lays out");
static_assert(HEAD_SIZE % 8 == 0 && V_HEAD_SIZE >= 1 && V_HEAD_SIZE <= HEAD_SIZE, "operator limits");
static_assert(ROW_TILE % 16 == 0 && ROW_TILE <= 64, "row tiles");
static_assert(kLaneColumns <= KV_TILE, "a lane's columns lie in one load tile");
static_assert(K_SPLIT == 2 || K_SPLIT == 4, "swizzled steps");
static_assert(STAGES > kGroups, "a compute tile takes a stage a group, and one must be in flight");
static_assert(!kSelfLoading || STAGES >= 2 * kGroups, "the next compute tile is asked for before this one is consumed");

#include "sm80/loader.cuh"

// Offset of a warp's j-th k16 step from its first one, `at` being the swizzled start: with a split of 4 each step is one
// slab further; with 2 the odd ones flip the chunk's high bit instead.
__device__ __forceinline__ u32 step_address(u32 base, u32 at, int j) {
  return kKSplit == 4 ? base + at + j * 128 : base + (at ^ ((j & 1) << 6)) + (j >> 1) * 128;
}
__device__ __forceinline__ int pick(const int* values, int which) {
  int v = values[0];
#pragma unroll
  for (int h = 1; h < kGroups; h++) v = which == h ? values[h] : v;
  return v;
}

extern "C" __global__ void 
#if REGISTERS && __CUDA_ARCH__ < 1000
__maxnreg__(REGISTERS)
#else
__launch_bounds__(kThreads, CTAS_PER_SM)
#endif
SYMBOL(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int slice = blockIdx.x / p.row_tiles, row_tile = blockIdx.x % p.row_tiles;
  const u32 full = shared + kBarrierOffset, empty = full + 8 * STAGES, query_full = empty + 8 * STAGES, query_empty = query_full + 8;

  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, kStageArrivals);
      barrier_init(empty + 8 * i, kConsumers);
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
    if (ROW_TILE == 16 && p.starts[p.slices / 2].count > 0) hold_place();   // where most have nothing to do, there is room enough
    return;
  }

#if PRODUCER_WARPS
  if (warp >= kConsumerWarps) {
    Loader loader(p, shared, full, tid - kConsumers, start);
    if (p.schedule_settled && loader.thread < 32) loader.prefetch_keys();
    wait_for_previous_kernels();
    produce<kQueryInRegisters>(loader, empty, query_full, query_empty);
    return;
  }
#else
  Loader loader(p, shared, full, tid, start);
  if (p.schedule_settled && loader.thread < 32) loader.prefetch_keys();
  wait_for_previous_kernels();
  int load_stage = 0, issued = 0;
  loader.load_query(loader.item, query_full);
  for (; issued < STAGES && loader.left > 0 && !loader.at_item_end(); issued++) {
    loader.issue(load_stage);
    if (++load_stage == STAGES) load_stage = 0;
  }
#endif

#if PRODUCER_WARPS
  // The first query, by the computing warps, which have nothing else to do while the first keys are on their way.
  wait_for_previous_kernels();
  copy_query<kConsumers>(p, shared, start.first, row_tile, tid);
  copy_async_wait_all();
  named_barrier_sync<kConsumers>();
  bool query_here = true;
#endif
  const int k_warp = warp % kKSplit, group = warp / kKSplit, l7 = lane & 7, quad_row = lane >> 2, quad_column = (lane & 3) * 2;
  // B operand of QK (rows of K): the chunk of the warp's first k16 step, swizzled.
  const u32 key_chunk = ((2 * k_warp + ((lane >> 3) & 1)) ^ l7) << 4;
  const u32 key_base = shared + kKvOffset + (l7 + ((lane >> 4) << 3)) * kRowBytes;
  const u32 score_write = shared + kScoreOffset + ((k_warp * ROW_TILE + quad_row) * kScorePitch + group * KV_TILE + quad_column) * 4;
  // Softmax: a lane owns kLaneColumns columns of one row; spare lanes shadow the last row and write nothing.
  const bool row_owner = lane / kLanesPerRow < kWarpRows;
  const int own_row = warp * kWarpRows + min(lane / kLanesPerRow, kWarpRows - 1), own_column = lane % kLanesPerRow * kLaneColumns;
  const u32 score_read = shared + kScoreOffset + (own_row * kScorePitch + own_column) * 4;
  // PV: A operand P, B operand V transposed on load.
  const u32 probability_base = shared + kProbabilityOffset + (l7 + ((lane >> 3) & 1) * 8) * kProbabilityPitch + ((lane >> 4) << 4);
  const u32 value_base = shared + kKvOffset + (l7 + ((lane >> 3) & 1) * 8) * kRowBytes;
  u32 value_chunk[kColumnTiles];
#pragma unroll
  for (int j = 0; j < kColumnTiles; j++) {
    const int c = warp * (kWarpColumns / 8) + 2 * j + (lane >> 4);
    value_chunk[j] = (c >> 3) * 128 + (((c & 7) ^ l7) << 4);
  }
  const u32 query_base = shared + kQueryOffset + (l7 + ((lane >> 3) & 1) * 8) * kRowBytes;
  const u32 query_chunk = ((2 * k_warp + (lane >> 4)) ^ l7) << 4;

  u32 query[kQueryInRegisters ? kSteps : 1][4];
  float out[kRowTiles16][kColumnTiles * 2][4];
#pragma unroll
  for (int a = 0; a < kRowTiles16; a++)
#pragma unroll
    for (int b = 0; b < kColumnTiles * 2; b++) out[a][b][0] = out[a][b][1] = out[a][b][2] = out[a][b][3] = 0.f;
  float row_max = kStartMax, row_sum = 0.f;
  const float score_factor = p.softcap > 0.f ? 2.f * kLog2E * p.scale / p.softcap : p.scale * kLog2E;

  int stage = 0, phase = 0, query_phase = 0, left = start.count;
  int tile = 0, tile_first = 0, tile_end = 0, segment_first = 0, row0 = 0, rows = 0, part = 0;   // of the current item
  int visible_from = 0, visible_to = 0;                                                          // of the own row
  bool new_item = true, first_segment = true;
#pragma unroll 1
  while (left > 0) {
    if (new_item) {
#if PRODUCER_WARPS
      if (!query_here) {
        barrier_wait(query_full, query_phase);
        query_phase ^= 1;
      }
      query_here = false;
#else
      barrier_wait(query_full, query_phase);
      query_phase ^= 1;
#endif
      const int4 a = load_s32x4(shared + kItemOffset), b = load_s32x4(shared + kItemOffset + 16);
      row0 = a.x + row_tile * ROW_TILE;
      rows = a.y - row_tile * ROW_TILE;
      part = b.z;
      const int position = a.z + (a.w + row_tile * ROW_TILE + own_row) / p.num_heads;
      visible_from = visible_begin(position, p.local_window_size);
      visible_to = own_row < rows ? (p.causal ? position + 1 : b.x) : 0;
      tile_first = visible_begin(a.z + a.w / p.num_heads, p.local_window_size) / KV_TILE;
      tile_end = tile_first + b.y;
      tile = tile_first + (first_segment ? start.offset : 0);
      segment_first = tile;
      new_item = false;
      if (kQueryInRegisters) {
#pragma unroll
        for (int j = 0; j < kSteps; j++) load_matrix_x4(query[j], step_address(query_base, query_chunk, j));
        barrier_arrive(query_empty);
      }
    }
    // A compute tile is `pair` load tiles of one segment.
    int segment_left = min(tile_end - tile, left);
    if (p.chunk) segment_left = min(segment_left, p.chunk - tile % p.chunk);
    const int pair = min(segment_left, kGroups);
    const bool segment_end = segment_left == pair, item_end = tile + pair == tile_end;
    const bool whole = segment_first == tile_first && item_end;
    int stages[kGroups], phases[kGroups];
#pragma unroll
    for (int h = 0; h < kGroups; h++) {
      const bool wrap = stage + h >= STAGES;
      stages[h] = wrap ? stage + h - STAGES : stage + h;
      phases[h] = phase ^ (wrap ? 1 : 0);
    }

    // ---- S = Q K^T, a quarter of the reduction a warp ----
    if (group < pair) {
      const int own_stage = pick(stages, group);
      barrier_wait(full + 8 * own_stage, pick(phases, group));
      const u32 key = key_base + own_stage * (KV_TILE * kRowBytes);
      constexpr int kPass = kRowTiles16 <= 2 ? kScoreTiles / 2 : 1;   // n16 blocks at a time: tall tiles lack registers
#pragma unroll
      for (int n0 = 0; n0 < kScoreTiles / 2; n0 += kPass) {
        float s[kRowTiles16][kPass * 2][4];
#pragma unroll
        for (int a = 0; a < kRowTiles16; a++)
#pragma unroll
          for (int b = 0; b < kPass * 2; b++) s[a][b][0] = s[a][b][1] = s[a][b][2] = s[a][b][3] = 0.f;
#pragma unroll
        for (int j = 0; j < kSteps; j++) {
          u32 q[kRowTiles16][4];
#pragma unroll
          for (int a = 0; a < kRowTiles16; a++)
            if (!kQueryInRegisters) load_matrix_x4(q[a], step_address(query_base, query_chunk, j) + a * 16 * kRowBytes);
#pragma unroll
          for (int n = 0; n < kPass; n++) {
            u32 b[4];
            load_matrix_x4(b, step_address(key, key_chunk, j) + (n0 + n) * 16 * kRowBytes);
#pragma unroll
            for (int a = 0; a < kRowTiles16; a++) {
              const u32* qa = kQueryInRegisters ? query[j] : q[a];
              mma_m16n8k16(s[a][2 * n], qa, b[0], b[1]);
              mma_m16n8k16(s[a][2 * n + 1], qa, b[2], b[3]);
            }
          }
        }
#pragma unroll
        for (int a = 0; a < kRowTiles16; a++)
#pragma unroll
          for (int b = 0; b < kPass * 2; b++) {
            const u32 at = score_write + (a * 16 * kScorePitch + (n0 * 2 + b) * 8) * 4;
            store_f32x2(at, s[a][b][0], s[a][b][1]);
            store_f32x2(at + 8 * kScorePitch * 4, s[a][b][2], s[a][b][3]);
          }
      }
    }
    if (!kQueryInRegisters && !kSelfLoading && item_end) {
      barrier_arrive(query_empty);
    }
    named_barrier_sync<kConsumers>();                             // S partials are there; the last tile's V is read
#if !PRODUCER_WARPS
    // Every warp is past the last compute tile, so its stages are free; at an item's end, so is the query.
    if (item_end && left > pair) {
      loader.next_item();
      loader.load_query(loader.item, query_full);
    }
    for (; issued < STAGES && loader.left > 0 && !loader.at_item_end(); issued++) {
      loader.issue(load_stage);
      if (++load_stage == STAGES) load_stage = 0;
    }
#endif

    // The other groups' tiles are complete, as their warps passed the barrier; here each thread sees it for itself.
#pragma unroll
    for (int h = 0; h < kGroups; h++)
      if (h < pair) barrier_wait(full + 8 * stages[h], phases[h]);

    // ---- softmax over whole rows ----
    {
      float x[kLaneColumns], mask[kLaneColumns];
      const int h = own_column / KV_TILE;
      const int own_stage = pick(stages, min(h, pair - 1));       // of an absent load tile nothing is read: it is being filled
#pragma unroll
      for (int c = 0; c < kLaneColumns; c++) x[c] = 0.f;
#pragma unroll
      for (int k = 0; k < kKSplit; k++)
#pragma unroll
        for (int c = 0; c < kLaneColumns; c += 4) {
          const float4 v = load_f32x4(score_read + (k * ROW_TILE * kScorePitch + c) * 4);
          x[c] += v.x; x[c + 1] += v.y; x[c + 2] += v.z; x[c + 3] += v.w;
        }
#pragma unroll
      for (int c = 0; c < kLaneColumns; c += 4) {
        const float4 v = load_f32x4(shared + kMaskOffset + (own_stage * KV_TILE + own_column % KV_TILE + c) * 4);
        mask[c] = v.x; mask[c + 1] = v.y; mask[c + 2] = v.z; mask[c + 3] = v.w;
      }
      const int position = tile * KV_TILE + own_column;
      const bool there = h < pair;                                // an absent load tile is masked, its stale bytes unused
      float top = kStartMax;
#pragma unroll
      for (int c = 0; c < kLaneColumns; c++) {
        const bool seen = there && mask[c] == 0.f && position + c >= visible_from && position + c < visible_to;
        float y = x[c] * score_factor;
        if (p.softcap > 0.f) y = p.softcap * kLog2E * (1.f - 2.f * reciprocal_fast(exp2_fast(y) + 1.f));   // tanh
        x[c] = seen ? y : kMasked;
        top = fmaxf(top, x[c]);
      }
#pragma unroll
      for (int d = kLanesPerRow / 2; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      const float new_max = fmaxf(row_max, top), rescale = exp2_fast(row_max - new_max);
      row_max = new_max;
      float sum = 0.f;
#pragma unroll
      for (int c = 0; c < kLaneColumns; c += 4) {
        const float p0 = exp2_fast(x[c] - new_max), p1 = exp2_fast(x[c + 1] - new_max);
        const float p2 = exp2_fast(x[c + 2] - new_max), p3 = exp2_fast(x[c + 3] - new_max);
        sum += (p0 + p1) + (p2 + p3);
        const u32 low = pack_pair(p0, p1), high = pack_pair(p2, p3);
        const u32 at = own_row * kProbabilityPitch + (own_column + c) * 2;
        if (row_owner) {
          store_u32x2(shared + kProbabilityOffset + at, low, high);
          if (WEIGHT_TERMS == 2) {
            const float2 a = unpack_pair(low), b = unpack_pair(high);
            store_u32x2(shared + kRemainderOffset + at, pack_pair(p0 - a.x, p1 - a.y), pack_pair(p2 - b.x, p3 - b.y));
          }
        }
      }
      row_sum = row_sum * rescale + sum;
      float inverse = 0.f;
      if (segment_end) {
        float l = row_sum;
#pragma unroll
        for (int d = kLanesPerRow / 2; d; d >>= 1) l += __shfl_xor_sync(~0u, l, d);
        inverse = l > 0.f ? 1.f / l : 0.f;
        const float lse = row_max + log2_fast(l);
        if (!whole) {
          const i64 slot = p.chunk ? part + tile / p.chunk - tile_first / p.chunk : 2 * slice + (first_segment ? 0 : 1);
#pragma unroll
          for (int e = 0; e < kEighths; e += kLanesPerRow) {
            const int eighth = e + lane % kLanesPerRow;
            if (row_owner && eighth < kEighths) partial_facts(p, (slot * p.row_tiles + row_tile) * ROW_TILE + own_row, eighth)->x = l > 0.f ? lse : kStartMax;
          }
        } else if (p.lse && row_owner && lane % kLanesPerRow == 0 && own_row < rows) {
          p.lse[(i64)row0 + own_row] = l > 0.f ? lse * kLn2 : kMinusInfinity;
        }
        row_max = kStartMax;
        row_sum = 0.f;
      }
      if (row_owner && lane % kLanesPerRow == 0) store_f32x2(shared + kFactorOffset + own_row * 8, rescale, inverse);
    }
    named_barrier_sync<kConsumers>();                             // P and the row factors are there

    // ---- O = O * rescale + P V ----
    float inverse[kRowTiles16][2];
#pragma unroll
    for (int a = 0; a < kRowTiles16; a++) {
      const float2 low = load_f32x2(shared + kFactorOffset + (a * 16 + quad_row) * 8);
      const float2 high = load_f32x2(shared + kFactorOffset + (a * 16 + quad_row + 8) * 8);
      inverse[a][0] = low.y;
      inverse[a][1] = high.y;
      if (__any_sync(~0u, low.x != 1.f || high.x != 1.f)) {
#pragma unroll
        for (int b = 0; b < kColumnTiles * 2; b++) {
          out[a][b][0] *= low.x; out[a][b][1] *= low.x; out[a][b][2] *= high.x; out[a][b][3] *= high.x;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kGroups; h++)
      if (h < pair) {
        const u32 value = value_base + stages[h] * (KV_TILE * kRowBytes);
#pragma unroll
        for (int k = 0; k < KV_TILE / 16; k++) {
          const u32 p_tile = probability_base + (h * (KV_TILE / 16) + k) * 32;
          u32 weights[WEIGHT_TERMS][kRowTiles16][4];
#pragma unroll
          for (int t = 0; t < WEIGHT_TERMS; t++)
#pragma unroll
            for (int a = 0; a < kRowTiles16; a++)
              if (kColumnTiles > 1) load_matrix_x4(weights[t][a], p_tile + (t * ROW_TILE + a * 16) * kProbabilityPitch);
#pragma unroll
          for (int j = 0; j < kColumnTiles; j++) {
            u32 b[4];
            load_matrix_x4_transposed(b, value + value_chunk[j] + k * 16 * kRowBytes);
#pragma unroll
            for (int t = 0; t < WEIGHT_TERMS; t++)
#pragma unroll
              for (int a = 0; a < kRowTiles16; a++) {
                u32* const w = weights[kColumnTiles > 1 ? t : 0][a];
                if (kColumnTiles == 1) load_matrix_x4(w, p_tile + (t * ROW_TILE + a * 16) * kProbabilityPitch);
                mma_m16n8k16(out[a][2 * j], w, b[0], b[1]);
                mma_m16n8k16(out[a][2 * j + 1], w, b[2], b[3]);
              }
          }
        }
        if (!kSelfLoading) {
          barrier_arrive(empty + 8 * stages[h]);
        }
      }
    // Neighbouring lanes trade halves so that a lane stores four neighbouring columns.
    const bool odd = lane & 1;
    const int column = warp * kWarpColumns + (odd ? 6 + quad_column : quad_column);
    if (segment_end && !whole) {
      const i64 slot = p.chunk ? part + tile / p.chunk - tile_first / p.chunk : 2 * slice + (first_segment ? 0 : 1);
      const u64 first_row = (slot * p.row_tiles + row_tile) * ROW_TILE + quad_row;
#pragma unroll
      for (int a = 0; a < kRowTiles16; a++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u64 at = first_row + a * 16 + half * 8;
          float most = 0.f;
#pragma unroll
          for (int b = 0; b < kColumnTiles * 2; b++)
#pragma unroll
            for (int e = 0; e < 2; e++)   // columns behind the value's are the key's, and nobody's
              if (V_HEAD_SIZE == kVPadded || warp * kWarpColumns + b * 8 + quad_column + e < V_HEAD_SIZE)
                most = larger_magnitude(most, out[a][b][2 * half + e]);
          most = largest_of_quad(most);
          const float factor = fixed_factor(most);
          u32* const words = partial_words(p, at, column);
#pragma unroll
          for (int b = 0; b < kColumnTiles * 2; b += 2) {
            const u32 x = pack_fixed(out[a][b][2 * half], out[a][b][2 * half + 1], factor);
            const u32 y = pack_fixed(out[a][b + 1][2 * half], out[a][b + 1][2 * half + 1], factor);
            const u32 received = __shfl_xor_sync(~0u, odd ? x : y, 1);
            *(uint2*)(words + b * 4) = odd ? make_uint2(received, y) : make_uint2(x, received);
            out[a][b][2 * half] = out[a][b][2 * half + 1] = out[a][b + 1][2 * half] = out[a][b + 1][2 * half + 1] = 0.f;
          }
          if (quad_column == 0) partial_facts(p, at, warp)->y = fixed_scale(most) * inverse[a][half];
        }
      first_segment = false;
    } else if (segment_end) {
      const bool vectors = output_takes_vectors(p);
#pragma unroll
      for (int a = 0; a < kRowTiles16; a++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = a * 16 + half * 8;
          const bool live = row + quad_row < rows;
          u16* const output = p.output + packed_row_offset(row0 + row + quad_row, p.num_heads, p.output_stride, V_HEAD_SIZE) + column;
#pragma unroll
          for (int b = 0; b < kColumnTiles * 2; b += 2) {
            const float x0 = out[a][b][2 * half] * inverse[a][half], y0 = out[a][b][2 * half + 1] * inverse[a][half];
            const float x1 = out[a][b + 1][2 * half] * inverse[a][half], y1 = out[a][b + 1][2 * half + 1] * inverse[a][half];
            const float rx = __shfl_xor_sync(~0u, odd ? x0 : x1, 1), ry = __shfl_xor_sync(~0u, odd ? y0 : y1, 1);
            const float4 v = odd ? make_float4(rx, ry, x1, y1) : make_float4(x0, y0, rx, ry);
            if (live) store_columns(output + b * 8, column + b * 8, v, vectors);
            out[a][b][2 * half] = out[a][b][2 * half + 1] = out[a][b + 1][2 * half] = out[a][b + 1][2 * half + 1] = 0.f;
          }
        }
      first_segment = false;
    }
    tile += pair;
    left -= pair;
    if (segment_end) segment_first = tile;
    new_item = item_end;
#if !PRODUCER_WARPS
    issued -= pair;
#endif
    stage += pair;
    if (stage >= STAGES) { stage -= STAGES; phase ^= 1; }
  }
#if !PRODUCER_WARPS
  copy_async_wait_all();
#endif
}
