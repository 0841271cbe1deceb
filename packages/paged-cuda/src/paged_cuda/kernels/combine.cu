// Merges the parts that an mma.sync kernel left of items that the schedule cut, in part order, and writes the zeros of tokens that no request owns.
//
// A task is one of COLUMN_PARTS parts of the columns of one row of one entry of the schedule's list; workers take them in
// turn. A worker is a warp where there are many rows, and a block of 128 threads where there are few rows in many parts;
// its threads are groups of parts times lanes of four columns. One pass with an online rescale: a group adds its parts in
// order, and the groups are added in order. All loads of a batch of parts are issued before the first use.
// A block and one of the attend kernel fit a multiprocessor together: it waits there, its list entry already read, while
// attend still runs.
//
// Macros: BF16 V_HEAD_SIZE ROW_TILE COLUMN_PARTS WORKER
#include "layout/output.cuh"
#include "layout/schedule.cuh"
#include "layout/zero_rows.cuh"
#include "math/partial.cuh"
#include "ptx/base2.cuh"
#include "ptx/dependency.cuh"

constexpr int kThreads = 128, kWorker = WORKER;
constexpr int kColumns = kVPadded / COLUMN_PARTS;
constexpr int kLanes = kColumns / 4 < kWorker ? kColumns / 4 : kWorker;
constexpr int kVectors = kColumns / 4 / kLanes;                  // float4 a lane
constexpr int kGroups = kWorker / kLanes;                        // parts at a time
constexpr int kBatch = 8 / kVectors > 0 ? 8 / kVectors : 1;      // parts a thread has in flight
static_assert(kVPadded % (4 * COLUMN_PARTS) == 0 && kLanes * kVectors * 4 == kColumns && kGroups >= 1, "lanes");

extern "C" __global__ void __launch_bounds__(kThreads, 6) SYMBOL(const __grid_constant__ AttentionParams p) {
  __shared__ float4 group_sum[kGroups][kLanes];
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
  if (entry.parts < 0 && blockIdx.x > 0) return;
  wait_for_previous_kernels();
  const bool vectors = output_takes_vectors(p);
  for (;;) {
    if (entry.parts < 0) return;
    const int within = task % tasks;
    const int row = within / COLUMN_PARTS, column_part = within % COLUMN_PARTS, column = column_part * kColumns + lane * 4;
    if (entry.parts == 0) {
      zero_rows(p, entry, within, tasks, thread, kWorker);
    } else if (row < entry.rows) {
      const u32 slot_rows = p.row_tiles * ROW_TILE;
      const u32 first_row = entry.slot * slot_rows + row, step = p.chunk ? slot_rows : 2 * slot_rows;   // parts lie 1 or 2 slots apart
      float top = kStartMax, weight = 0.f;
      float4 sum[kVectors];
#pragma unroll
      for (int e = 0; e < kVectors; e++) sum[e] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (group < kGroups)
        for (int first = group; first < entry.parts; first += kBatch * kGroups) {
          float lse[kBatch];
          float4 v[kBatch][kVectors];
#pragma unroll
          for (int u = 0; u < kBatch; u++) {
            const int part = first + u * kGroups;
            const u32 at = first_row + part * step + (part == 0 ? entry.adjust * slot_rows : 0);
            lse[u] = kMasked;
#pragma unroll
            for (int e = 0; e < kVectors; e++) v[u][e] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (part < entry.parts) {
              lse[u] = p.partial_lse[at];
#pragma unroll
              for (int e = 0; e < kVectors; e++) v[u][e] = *(const float4*)(p.partial_output + (u64)at * kVPadded + column + e * kLanes * 4);
            }
          }
          float new_top = top;
#pragma unroll
          for (int u = 0; u < kBatch; u++) new_top = fmaxf(new_top, lse[u]);
          const float rescale = exp2_fast(top - new_top);
          top = new_top;
          weight *= rescale;
#pragma unroll
          for (int e = 0; e < kVectors; e++) { sum[e].x *= rescale; sum[e].y *= rescale; sum[e].z *= rescale; sum[e].w *= rescale; }
#pragma unroll
          for (int u = 0; u < kBatch; u++) {
            const float w = lse[u] > kStartMax ? exp2_fast(lse[u] - new_top) : 0.f;
            weight += w;
#pragma unroll
            for (int e = 0; e < kVectors; e++) {
              sum[e].x += v[u][e].x * w; sum[e].y += v[u][e].y * w; sum[e].z += v[u][e].z * w; sum[e].w += v[u][e].w * w;
            }
          }
        }
      if (kGroups > 1) {   // then kVectors is 1
        __syncthreads();
        if (group < kGroups) {
          group_sum[group][lane] = sum[0];
          if (lane == 0) { group_max[group] = top; group_weight[group] = weight; }
        }
        __syncthreads();
        sum[0] = make_float4(0.f, 0.f, 0.f, 0.f);
        weight = 0.f;
        top = kStartMax;
#pragma unroll
        for (int i = 0; i < kGroups; i++) top = fmaxf(top, group_max[i]);
        if (group == 0)
#pragma unroll
          for (int i = 0; i < kGroups; i++) {
            const float w = exp2_fast(group_max[i] - top);
            const float4 v = group_sum[i][lane];
            weight += w * group_weight[i]; sum[0].x += w * v.x; sum[0].y += w * v.y; sum[0].z += w * v.z; sum[0].w += w * v.w;
          }
      }
      if (group == 0) {
        const float inverse = weight > 0.f ? 1.f / weight : 0.f;
        u16* const output = p.output + packed_row_offset(entry.row0 + row, p.num_heads, p.output_stride, V_HEAD_SIZE) + column;
#pragma unroll
        for (int e = 0; e < kVectors; e++)
          store_columns(output + e * kLanes * 4, column + e * kLanes * 4, make_float4(sum[e].x * inverse, sum[e].y * inverse, sum[e].z * inverse, sum[e].w * inverse), vectors);
        if (p.lse && column_part == 0 && lane == 0)
          p.lse[(i64)entry.row0 + row] = weight > 0.f ? (top + log2_fast(weight)) * kLn2 : kMinusInfinity;
      }
    }
    task += gridDim.x * (kThreads / kWorker);
    entry = p.splits[task / tasks];
  }
}
