// Merges the parts that an mma.sync kernel left of items that the schedule cut, in part order, and writes the zeros of tokens that no request owns.
//
// A task is one of COLUMN_PARTS parts of the columns of one row of one entry of the schedule's list; workers take them in
// turn. A worker is a warp or half of one where there are many rows, and a block of 128 threads where there are few rows in many
// parts; its threads are groups of parts times lanes of neighbouring columns. One pass with an online rescale: a group adds its parts in
// order, and the groups are added in order. All loads of a batch of parts are issued before the first use.
// On Hopper a block and one of the attend kernel of 16 rows fit a multiprocessor together, by kBlocks: it waits there, its list entry already
// read, while attend still runs. Blocks that find no place before attend ends crowd where it ends first.
//
// Macros: BF16 V_HEAD_SIZE ROW_TILE COLUMN_PARTS WORKER
#include "layout/output.cuh"
#include "layout/row_partial.cuh"
#include "layout/schedule.cuh"
#include "layout/zero_rows.cuh"
#include "math/partial.cuh"
#include "ptx/base2.cuh"
#include "ptx/dependency.cuh"

constexpr int kThreads = 128, kWorker = WORKER;
constexpr int kBlocks = kVPadded == 128 ? 8 : 6;   // a multiprocessor: 64 or 80 registers a thread, what the narrow and the wide attend kernel leave
constexpr int kColumns = kVPadded / COLUMN_PARTS;
constexpr int kLaneColumns = (kWorker == 32 ? kColumns % 256 == 0 : kColumns >= 64) ? 8 : 4;   // neighbours
constexpr int kLanes = kColumns / kLaneColumns < kWorker ? kColumns / kLaneColumns : kWorker;
constexpr int kVectors = kColumns / kLaneColumns / kLanes;       // of a lane
constexpr int kGroups = kWorker / kLanes;                        // parts at a time
// Vectors a thread has in flight. A narrow row's code is kept short, as it is fetched anew after each attend kernel.
constexpr int kInFlight = kVPadded == 128 ? 4 : 8;
constexpr int kBatch = kInFlight > kVectors ? kInFlight / kVectors : 1;   // parts
static_assert(kVPadded % (4 * COLUMN_PARTS) == 0 && kLanes * kVectors * kLaneColumns == kColumns && kGroups >= 1, "lanes");
static_assert(kGroups == 1 || (kVectors == 1 && kWorker == kThreads), "groups are those of a block, and have one sum a lane");

// Neighbouring columns of one row of a partial.
struct Columns {
  u32 words[kLaneColumns / 2];
  __device__ __forceinline__ void load(const u32* at) {
    if constexpr (kLaneColumns == 8) {
      const uint4 v = *(const uint4*)at;
      words[0] = v.x; words[1] = v.y; words[2] = v.z; words[3] = v.w;
    } else {
      const uint2 v = *(const uint2*)at;
      words[0] = v.x; words[1] = v.y;
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) SYMBOL(const __grid_constant__ AttentionParams p) {
  __shared__ __align__(16) float group_sum[kGroups][kLanes][kLaneColumns];
  __shared__ float group_max[kGroups], group_weight[kGroups];
  const int thread = threadIdx.x % kWorker, group = thread / kLanes, lane = thread % kLanes;
  const int rows = p.num_heads < ROW_TILE ? ROW_TILE : p.num_heads;   // that an item may have
  const u32 tasks = rows * COLUMN_PARTS;                              // of an entry
  let_next_kernel_start();
  u32 task = blockIdx.x * (kThreads / kWorker) + threadIdx.x / kWorker;
  // A list older than the attend kernel is read while that still runs.
  if (!p.schedule_settled) wait_for_previous_kernels();
  SplitItem entry = p.splits[task / tasks];
  // Who has nothing to do makes room for the next attend kernel. One block waits in any case: for it alone the kernels after this one wait.
  if (entry.parts < 0) {
    if (blockIdx.x == 0) wait_for_previous_kernels();
    return;
  }
  const bool vectors = output_takes_vectors(p);
  while (entry.parts >= 0) {
    const int within = task % tasks;
    const int row = within / COLUMN_PARTS, first_column = within % COLUMN_PARTS * kColumns, column = first_column + lane * kLaneColumns;
    const u32 slot_rows = p.row_tiles * ROW_TILE;
    const u32 first_row = entry.slot * slot_rows + row, step = p.chunk ? slot_rows : 2 * slot_rows;   // parts lie 1 or 2 slots apart
    wait_for_previous_kernels();
    if (entry.parts == 0) {
      zero_rows(p, entry, within, tasks, thread, kWorker);
    } else if (row < entry.rows) {
      float top = kStartMax, weight = 0.f, sum[kVectors][kLaneColumns] = {};
      if (group < kGroups)
        for (int first = group; first < entry.parts; first += kBatch * kGroups) {
          float lse[kBatch], scale[kBatch][kVectors];
          Columns v[kBatch][kVectors];
#pragma unroll
          for (int u = 0; u < kBatch; u++) {
            const int part = first + u * kGroups;
            const u32 at = first_row + part * step + (part == 0 ? entry.adjust * slot_rows : 0);
            lse[u] = kMasked;
#pragma unroll
            for (int e = 0; e < kVectors; e++) {
              scale[u][e] = 0.f;
              v[u][e] = Columns{};
            }
            if (part < entry.parts) {
#pragma unroll
              for (int e = 0; e < kVectors; e++) {
                const float2 f = *partial_facts(p, at, (column + e * kLanes * kLaneColumns) / kScaleColumns);
                if (e == 0) lse[u] = f.x;
                scale[u][e] = f.y;
                v[u][e].load(partial_words(p, at, column + e * kLanes * kLaneColumns));
              }
            }
          }
          float new_top = top;
#pragma unroll
          for (int u = 0; u < kBatch; u++) new_top = fmaxf(new_top, lse[u]);
          const float rescale = exp2_fast(top - new_top);
          top = new_top;
          weight *= rescale;
#pragma unroll
          for (int e = 0; e < kVectors; e++)
#pragma unroll
            for (int c = 0; c < kLaneColumns; c++) sum[e][c] *= rescale;
#pragma unroll
          for (int u = 0; u < kBatch; u++) {
            const float w = lse[u] > kStartMax ? exp2_fast(lse[u] - new_top) : 0.f;
            weight += w;
#pragma unroll
            for (int e = 0; e < kVectors; e++) {
              const float f = w * scale[u][e];
#pragma unroll
              for (int c = 0; c < kLaneColumns / 2; c++) {
                sum[e][2 * c] += fixed_low(v[u][e].words[c]) * f;
                sum[e][2 * c + 1] += fixed_high(v[u][e].words[c]) * f;
              }
            }
          }
        }
      u16* const output = p.output + packed_row_offset(entry.row0 + row, p.num_heads, p.output_stride, V_HEAD_SIZE);
      if (kGroups > 1) {
        __syncthreads();
        if (group < kGroups) {
#pragma unroll
          for (int c = 0; c < kLaneColumns; c += 4) *(float4*)(group_sum[group][lane] + c) = make_float4(sum[0][c], sum[0][c + 1], sum[0][c + 2], sum[0][c + 3]);
          if (lane == 0) { group_max[group] = top; group_weight[group] = weight; }
        }
        __syncthreads();
        for (int k = thread; k < kColumns / 2; k += kWorker) {   // pairs of columns
          float most = kStartMax, all = 0.f, a = 0.f, b = 0.f;
#pragma unroll
          for (int i = 0; i < kGroups; i++) most = fmaxf(most, group_max[i]);
#pragma unroll
          for (int i = 0; i < kGroups; i++) {
            const float w = exp2_fast(group_max[i] - most);
            const float2 v = *(const float2*)(&group_sum[i][0][0] + 2 * k);
            all += w * group_weight[i];
            a += w * v.x;
            b += w * v.y;
          }
          const float inverse = all > 0.f ? 1.f / all : 0.f;
          store_pair(output, first_column + 2 * k, a * inverse, b * inverse, vectors);
          if (p.lse && first_column == 0 && k == 0) p.lse[(i64)entry.row0 + row] = all > 0.f ? (most + log2_fast(all)) * kLn2 : kMinusInfinity;
        }
      } else {
        const float inverse = weight > 0.f ? 1.f / weight : 0.f;
#pragma unroll
        for (int e = 0; e < kVectors; e++)
#pragma unroll
          for (int c = 0; c < kLaneColumns; c += 4) {
            const int from = column + e * kLanes * kLaneColumns + c;
            store_columns(output + from, from, make_float4(sum[e][c] * inverse, sum[e][c + 1] * inverse, sum[e][c + 2] * inverse, sum[e][c + 3] * inverse), vectors);
          }
        if (p.lse && first_column == 0 && lane == 0)
          p.lse[(i64)entry.row0 + row] = weight > 0.f ? (top + log2_fast(weight)) * kLn2 : kMinusInfinity;
      }
    }
    task += gridDim.x * (kThreads / kWorker);
    entry = p.splits[task / tasks];
  }
}
