// Merges the parts that the wgmma kernel left of items that the schedule cut, in part order, and writes the zeros of
// tokens that no request owns.
//
// A line is two rows eight apart, as the accumulators of a warp hold them; their partials lie as layout/paired_partial.cuh says. A task is
// one of COLUMN_PARTS parts of the columns of one line of one entry of the schedule's list; workers take them in turn. A worker
// is a warp where there are many lines, and a block where there are few lines in many parts; its threads are groups of parts times
// lanes of 16 bytes. The parts are fetched into shared memory, as many as fit, all of them under way at once and without a
// register each: the code stays short, which counts, as it is fetched anew after each attend kernel. Their log-sum-exps and scales come
// first: while the parts are on their way, they become one factor for each part, row and half of the columns. Then a group adds its
// parts in order, and the groups are added. Where an item has more parts than fit, what was added is rescaled.
// No block fits a multiprocessor beside one of the wgmma kernel, which in small steps leaves half of them to this one.
//
// Macros: BF16 V_HEAD_SIZE ROW_TILE COLUMN_PARTS WORKER SHARED_BYTES
#include "layout/output.cuh"
#include "layout/paired_partial.cuh"
#include "layout/schedule.cuh"
#include "layout/zero_rows.cuh"
#include "math/partial.cuh"
#include "ptx/base2.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/dependency.cuh"
#include "ptx/shared.cuh"

constexpr int kThreads = 256, kWorker = WORKER, kWorkers = kThreads / kWorker, kWarps = kWorker / 32;
constexpr int kColumns = kVPadded / COLUMN_PARTS;
constexpr int kWords = kColumns / 4;                             // of 16 bytes: four columns of two rows
constexpr int kLanes = kWords < kWorker ? kWords : kWorker;
constexpr int kVectors = kWords / kLanes;                        // of a lane
constexpr int kGroups = kWorker / kLanes;                        // parts at a time
constexpr int kPairs = kLanes * 4;                               // of neighbouring columns of a row, where groups are added
constexpr int kParts = SHARED_BYTES / kWorkers / (kWords * 16 + 48);    // of a task in shared memory
static_assert(kVPadded % (16 * COLUMN_PARTS) == 0 && kLanes * kVectors == kWords && kGroups >= 1 && kParts >= 2, "lanes");
static_assert(kGroups == 1 ? kWorker == 32 : kVectors == 1 && kWorker == kThreads, "a block has groups, which have one sum a lane, a warp has none");

// Lanes that share the groups of a pair: as many as there are threads for.
constexpr int merging_lanes(int lanes) { return 2 * lanes <= kGroups && 2 * lanes * kPairs <= kWorker ? merging_lanes(2 * lanes) : lanes; }
constexpr int kMerge = merging_lanes(1);

__device__ __forceinline__ void meet_worker() {
  if (kWorker == kThreads) __syncthreads();
  else __syncwarp();
}
// Over the lanes of a warp that have the same of two rows.
__device__ __forceinline__ float largest_of_row(float x) {
#pragma unroll
  for (int d = 2; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int d = 2; d < 32; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) SYMBOL(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  __shared__ __align__(16) float group_sum[kGroups][kLanes][8], warp_top[kWarps][2], warp_weight[kWarps][2];
  const int thread = threadIdx.x % kWorker, worker = threadIdx.x / kWorker, group = thread / kLanes, lane = thread % kLanes;
  // Of each part: its words; of both rows, log-sum-exp and scale of both halves; of both halves, the factors of both rows.
  const u32 words = shared_address(shared_memory) + worker * (kParts * (kWords * 16 + 48)), facts = words + kParts * kWords * 16, factors = facts + kParts * 32;
  const int rows = p.num_heads < ROW_TILE ? ROW_TILE : p.num_heads;   // that an item may have
  const u32 tasks = (rows + 15) / 16 * 8 * COLUMN_PARTS;              // of an entry
  let_next_kernel_start();
  u32 task = blockIdx.x * kWorkers + worker;
  // A list older than the attend kernel is read while that still runs.
  if (!p.schedule_settled) wait_for_previous_kernels();
  SplitItem entry = p.splits[task / tasks];
  // Who has nothing to do makes room for the next attend kernel, which several row tiles do not gain from. One block waits in any case: for it
  // alone the kernels after this one wait.
  if (entry.parts < 0) {
    if (blockIdx.x == 0 || p.row_tiles > 1) wait_for_previous_kernels();
    return;
  }
  const bool vectors = output_takes_vectors(p);
  while (entry.parts >= 0) {
    const int within = task % tasks, line = within / COLUMN_PARTS, first_column = within % COLUMN_PARTS * kColumns;
    const int row = line / 8 * 16 + line % 8;   // and row + 8
    const u32 slot_rows = p.row_tiles * ROW_TILE;
    const u32 first_row = entry.slot * slot_rows + row, step = p.chunk ? slot_rows : 2 * slot_rows;   // parts lie 1 or 2 slots apart
    const int own = thread & 1;                                         // the row whose log-sum-exps a thread looks at
    const bool both = row + 8 < entry.rows, there = own == 0 || both;   // what lies in a row that is none of the item's may be anything
    wait_for_previous_kernels();
    if (entry.parts == 0) {
      zero_rows(p, entry, within, tasks, thread, kWorker);
    } else if (row < entry.rows) {
      float top = kStartMax, weight = 0.f, sum[kVectors][8] = {};     // maximum and sum of the own row
      u16 *output = nullptr, *second = nullptr;
      for (int base = 0; base < entry.parts; base += kParts) {
        const int parts = min(entry.parts - base, kParts);
        meet_worker();
        // Parts lie `step` rows apart, but for the item's first.
        const u32 row0 = first_row + base * step, away = base == 0 ? entry.adjust * slot_rows : 0;
        const unsigned char* from = (const unsigned char*)partial_facts(p, row0 + thread / 2 * step + own * 8, 0);
#pragma unroll 1
        for (int k = thread; k < parts * 2; k += kWorker, from += kWorker / 2 * step * kFactBytes)
          copy_async_16(facts + k * 16, k < 2 ? from + away * kFactBytes : from, 16);
        copy_async_commit();
        from = (const unsigned char*)partial_words(p, row0 + group * step, first_column + lane / 4 * 16, lane % 4);
#pragma unroll 1
        for (int part = group; part < (group < kGroups ? parts : 0); part += kGroups, from += kGroups * step * kRowBytes)
#pragma unroll
          for (int e = 0; e < kVectors; e++)
            copy_async_16(words + (part * kWords + e * kLanes + lane) * 16, from + e * kLanes * 128 + (part == 0 ? away * kRowBytes : 0), 16);
        copy_async_commit();
        output = p.output + packed_row_offset(entry.row0 + row, p.num_heads, p.output_stride, V_HEAD_SIZE);
        if (both) second = p.output + packed_row_offset(entry.row0 + row + 8, p.num_heads, p.output_stride, V_HEAD_SIZE);
        copy_async_wait<1>();   // a thread looks at what it fetched itself
        float most = top;
#pragma unroll 1
        for (int k = thread; k < parts * 2; k += kWorker) most = fmaxf(most, there ? load_f32(facts + k * 16) : kMasked);
        most = largest_of_row(most);
        if constexpr (kWarps > 1) {
          if (thread % 32 < 2) warp_top[thread / 32][own] = most;
          __syncthreads();
#pragma unroll
          for (int i = 0; i < kWarps; i++) most = fmaxf(most, warp_top[i][own]);
        }
        const float rescale = exp2_fast(top - most);
        top = most;
        float share = 0.f;
#pragma unroll 1
        for (int k = thread; k < parts * 2; k += kWorker) {
          const float4 f = load_f32x4(facts + k * 16);
          const float w = there && f.x > kStartMax ? exp2_fast(f.x - top) : 0.f;
          share += w;
          store_f32(factors + k / 2 * 16 + own * 4, w * f.y);
          store_f32(factors + k / 2 * 16 + own * 4 + 8, w * f.w);
        }
        share = sum_of_row(share);
        if (kWarps > 1 && thread % 32 < 2) warp_weight[thread / 32][own] = share;
        copy_async_wait_all();
        meet_worker();
        if constexpr (kWarps > 1) {
          share = 0.f;
#pragma unroll
          for (int i = 0; i < kWarps; i++) share += warp_weight[i][own];
        }
        weight = weight * rescale + share;
        if (base > 0) {
          const float rescales[2] = {__shfl_sync(~0u, rescale, 0), __shfl_sync(~0u, rescale, 1)};
#pragma unroll
          for (int e = 0; e < kVectors; e++)
#pragma unroll
            for (int c = 0; c < 8; c++) sum[e][c] *= rescales[c >> 1 & 1];
        }
#pragma unroll 1
        for (int part = group; part < (group < kGroups ? parts : 0); part += kGroups)
#pragma unroll
          for (int e = 0; e < kVectors; e++) {
            const int k = e * kLanes + lane;
            const float2 f = load_f32x2(factors + part * 16 + (first_column + k / 4 * 16 >= kVPadded / 2 ? 8 : 0));
            const int4 v = load_s32x4(words + (part * kWords + k) * 16);
            const u32 pairs[4] = {(u32)v.x, (u32)v.y, (u32)v.z, (u32)v.w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
              sum[e][2 * c] += fixed_low(pairs[c]) * (c & 1 ? f.y : f.x);
              sum[e][2 * c + 1] += fixed_high(pairs[c]) * (c & 1 ? f.y : f.x);
            }
          }
      }
      const float inverse = weight > 0.f ? reciprocal_fast(weight) : 0.f, inverses[2] = {__shfl_sync(~0u, inverse, 0), __shfl_sync(~0u, inverse, 1)};
      if (p.lse && first_column == 0 && thread < 2 && there) p.lse[(i64)entry.row0 + row + 8 * own] = weight > 0.f ? (top + log2_fast(weight)) * kLn2 : kMinusInfinity;
      if constexpr (kGroups > 1) {
        if (group < kGroups) {
          *(float4*)group_sum[group][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
          *(float4*)(group_sum[group][lane] + 4) = make_float4(sum[0][4], sum[0][5], sum[0][6], sum[0][7]);
        }
        meet_worker();
#pragma unroll
        for (int base = 0; base < kPairs; base += kWorker / kMerge) {
          const int k = base + thread / kMerge, pair = min(k, kPairs - 1), word = pair % 4, r = word & 1, from = pair / 4;
          float a = 0.f, b = 0.f;
#pragma unroll 4
          for (int i = thread % kMerge; i < kGroups; i += kMerge) {
            const float2 v = *(const float2*)(group_sum[i][from] + 2 * word);
            a += v.x;
            b += v.y;
          }
#pragma unroll
          for (int d = 1; d < kMerge; d *= 2) {
            a += __shfl_xor_sync(~0u, a, d);
            b += __shfl_xor_sync(~0u, b, d);
          }
          u16* const to = r ? second : output;
          const float factor = r ? inverses[1] : inverses[0];
          if (to && k < kPairs && thread % kMerge == 0)
            store_pair(to, first_column + from / 4 * 16 + (word >> 1) * 8 + from % 4 * 2, a * factor, b * factor, vectors);
        }
      } else {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          u16* const to = r ? second : output;
          if (!to) break;
#pragma unroll
          for (int e = 0; e < kVectors; e++) {
            const int k = e * kLanes + lane, column = first_column + k / 4 * 16 + k % 4 * 2;
            store_pair(to, column, sum[e][2 * r] * inverses[r], sum[e][2 * r + 1] * inverses[r], vectors);
            store_pair(to, column + 8, sum[e][4 + 2 * r] * inverses[r], sum[e][5 + 2 * r] * inverses[r], vectors);
          }
        }
      }
    }
    task += gridDim.x * kWorkers;
    entry = p.splits[task / tasks];
  }
}
