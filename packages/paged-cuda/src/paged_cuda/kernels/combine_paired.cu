// Merges the parts that the wgmma kernel left of items that the schedule cut, in part order, and writes the zeros of
// tokens that no request owns.
//
// A line is two rows eight apart, as the accumulators of a warp hold them; their partials lie as layout/paired_partial.cuh says. A task is
// one of COLUMN_PARTS parts of the columns of one line of one entry of the schedule's list; workers take them in turn. A worker
// is a warp where there are many lines, and a block where there are few lines in many parts; its threads are groups of parts times
// lanes of 16 bytes. The parts are fetched into shared memory, as many as fit, all of them under way at once and without a
// register each: the code stays short, which counts, as it is fetched anew after each attend kernel. A group adds its parts in order
// with an online rescale, and the groups are added in order.
// No block fits a multiprocessor beside one of the wgmma kernel.
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

constexpr int kThreads = 256, kWorker = WORKER, kWorkers = kThreads / kWorker;
constexpr int kColumns = kVPadded / COLUMN_PARTS;
constexpr int kWords = kColumns / 4;                             // of 16 bytes: four columns of two rows
constexpr int kLanes = kWords < kWorker ? kWords : kWorker;
constexpr int kVectors = kWords / kLanes;                        // of a lane
constexpr int kGroups = kWorker / kLanes;                        // parts at a time
constexpr int kParts = SHARED_BYTES / kWorkers / (kWords * 16 + 32);    // of a task in shared memory
static_assert(kVPadded % (16 * COLUMN_PARTS) == 0 && kLanes * kVectors == kWords && kGroups >= 1 && kParts >= 2, "lanes");
static_assert(kGroups == 1 || kVectors == 1, "one sum a lane where groups are added");

__device__ __forceinline__ void meet_worker() {
  if (kWorker == kThreads) __syncthreads();
  else __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) SYMBOL(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  __shared__ __align__(16) float group_sum[kGroups > 1 ? kGroups : 1][kLanes][8], group_max[kGroups][2], group_weight[kGroups][2];
  const int thread = threadIdx.x % kWorker, worker = threadIdx.x / kWorker, group = thread / kLanes, lane = thread % kLanes;
  uint4(&shared_words)[kParts][kWords] = ((uint4(*)[kParts][kWords])shared_memory)[worker];
  float4(&shared_facts)[kParts][2] = ((float4(*)[kParts][2])(shared_memory + kWorkers * kParts * kWords * 16))[worker];   // (log-sum-exp, scale) of both halves
  const int rows = p.num_heads < ROW_TILE ? ROW_TILE : p.num_heads;   // that an item may have
  const u32 tasks = (rows + 15) / 16 * 8 * COLUMN_PARTS;              // of an entry
  let_next_kernel_start();
  u32 task = blockIdx.x * kWorkers + worker;
  // A list older than the attend kernel is read while that still runs.
  if (!p.schedule_settled) wait_for_previous_kernels();
  SplitItem entry = p.splits[task / tasks];
  // Who has nothing to do makes room for the next attend kernel, which several row tiles do not gain from. One block waits in any case: for it
  // alone the kernels after this one wait.
  if (entry.parts < 0 && blockIdx.x > 0 && p.row_tiles == 1) return;
  wait_for_previous_kernels();
  const bool vectors = output_takes_vectors(p);
  for (;;) {
    if (entry.parts < 0) return;
    const int within = task % tasks, line = within / COLUMN_PARTS, first_column = within % COLUMN_PARTS * kColumns;
    const int row = line / 8 * 16 + line % 8;   // and row + 8
    if (entry.parts == 0) {
      zero_rows(p, entry, within, tasks, thread, kWorker);
    } else if (row < entry.rows) {
      const u32 slot_rows = p.row_tiles * ROW_TILE;
      const u32 first_row = entry.slot * slot_rows + row, step = p.chunk ? slot_rows : 2 * slot_rows;   // parts lie 1 or 2 slots apart
      const bool both = row + 8 < entry.rows;
      float top[2] = {kStartMax, kStartMax}, weight[2] = {0.f, 0.f}, sum[kVectors][8] = {};
      for (int base = 0; base < entry.parts; base += kParts) {
        const int parts = min(entry.parts - base, kParts);
        meet_worker();
        auto row_of = [&](int part) { return first_row + (base + part) * step + (base + part == 0 ? entry.adjust * slot_rows : 0); };
#pragma unroll 2
        for (int k = thread; k < parts * kWords; k += kWorker) {
          const int part = k / kWords, word = k % kWords;
          copy_async_16(shared_address(&shared_words[part][word]), partial_words(p, row_of(part), first_column + word / 4 * 16, word % 4), 16);
        }
        for (int k = thread; k < parts * 2; k += kWorker)
          copy_async_16(shared_address(&shared_facts[k / 2][k % 2]), partial_facts(p, row_of(k / 2) + k % 2 * 8, 0), 16);
        copy_async_wait_all();
        meet_worker();
#pragma unroll 1
        for (int part = group; part < (group < kGroups ? parts : 0); part += kGroups) {
          float w[2], scale[2][2];
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float4 facts = shared_facts[part][r];
            // The second row may be none of the item's: what lies there may be anything.
            const float lse = r == 0 || both ? facts.x : kMasked, new_top = fmaxf(top[r], lse), rescale = exp2_fast(top[r] - new_top);
            w[r] = lse > kStartMax ? exp2_fast(lse - new_top) : 0.f;
            top[r] = new_top;
            weight[r] = weight[r] * rescale + w[r];
            scale[0][r] = facts.y * w[r];
            scale[1][r] = facts.w * w[r];
#pragma unroll
            for (int e = 0; e < kVectors; e++)
#pragma unroll
              for (int c = 0; c < 8; c++)
                if ((c >> 1 & 1) == r) sum[e][c] *= rescale;
          }
#pragma unroll
          for (int e = 0; e < kVectors; e++) {
            const int k = e * kLanes + lane;
            const bool second_half = first_column + k / 4 * 16 >= kVPadded / 2;
            const float f[2] = {second_half ? scale[1][0] : scale[0][0], second_half ? scale[1][1] : scale[0][1]};
            const uint4 v = shared_words[part][k];
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
              sum[e][2 * c] += fixed_low(words[c]) * f[c & 1];
              sum[e][2 * c + 1] += fixed_high(words[c]) * f[c & 1];
            }
          }
        }
      }
      u16* const output = p.output + packed_row_offset(entry.row0 + row, p.num_heads, p.output_stride, V_HEAD_SIZE);
      u16* const second = both ? p.output + packed_row_offset(entry.row0 + row + 8, p.num_heads, p.output_stride, V_HEAD_SIZE) : nullptr;
      if (kGroups > 1) {
        if (group < kGroups) {
          *(float4*)group_sum[group][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
          *(float4*)(group_sum[group][lane] + 4) = make_float4(sum[0][4], sum[0][5], sum[0][6], sum[0][7]);
          if (lane == 0)
#pragma unroll
            for (int r = 0; r < 2; r++) { group_max[group][r] = top[r]; group_weight[group][r] = weight[r]; }
        }
        meet_worker();
        for (int k = thread; k < kLanes * 4; k += kWorker) {   // pairs of columns
          const int word = k % 4, r = word & 1, from = k / 4;
          float most = kStartMax, all = 0.f, a = 0.f, b = 0.f;
#pragma unroll 4
          for (int i = 0; i < kGroups; i++) most = fmaxf(most, group_max[i][r]);
#pragma unroll 4
          for (int i = 0; i < kGroups; i++) {
            const float w = exp2_fast(group_max[i][r] - most);
            const float2 v = *(const float2*)(group_sum[i][from] + 2 * word);
            all += w * group_weight[i][r];
            a += w * v.x;
            b += w * v.y;
          }
          const float inverse = all > 0.f ? 1.f / all : 0.f;
          u16* const to = r ? second : output;
          if (to) store_pair(to, first_column + from / 4 * 16 + (word >> 1) * 8 + from % 4 * 2, a * inverse, b * inverse, vectors);
          if (p.lse && first_column == 0 && k < 2 && to)
            p.lse[(i64)entry.row0 + row + 8 * r] = all > 0.f ? (most + log2_fast(all)) * kLn2 : kMinusInfinity;
        }
      } else {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          u16* const to = r ? second : output;
          if (!to) break;
          const float inverse = weight[r] > 0.f ? 1.f / weight[r] : 0.f;
#pragma unroll
          for (int e = 0; e < kVectors; e++) {
            const int k = e * kLanes + lane, column = first_column + k / 4 * 16 + k % 4 * 2;
            store_pair(to, column, sum[e][2 * r] * inverse, sum[e][2 * r + 1] * inverse, vectors);
            store_pair(to, column + 8, sum[e][4 + 2 * r] * inverse, sum[e][5 + 2 * r] * inverse, vectors);
          }
          if (p.lse && first_column == 0 && lane == 0)
            p.lse[(i64)entry.row0 + row + 8 * r] = weight[r] > 0.f ? (top[r] + log2_fast(weight[r])) * kLn2 : kMinusInfinity;
        }
      }
    }
    task += gridDim.x * kWorkers;
    entry = p.splits[task / tasks];
  }
}
