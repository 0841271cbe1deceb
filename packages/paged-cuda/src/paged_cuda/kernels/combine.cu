// Merges the parts of items that the schedule cut, in part order, and writes the zeros of tokens that no request owns.
//
// A task is COLUMN_PARTS-th of the columns of one row of one entry of the schedule's list; the grid fills the GPU once and
// strides over the tasks. A block whose entry is past the end of the list leaves at once, as all do when nothing was cut.
// Threads are groups of parts x lanes of four columns; one pass with an online rescale, and all loads of a batch of parts
// issued before the first use.
//
// Macros: BF16 V_HEAD_SIZE ROW_TILE COLUMN_PARTS
#include "layout/output.cuh"
#include "layout/schedule.cuh"
#include "math/partial.cuh"
#include "ptx/base2.cuh"
#include "ptx/dependency.cuh"

constexpr int kColumns = kVPadded / COLUMN_PARTS, kLanes = kColumns / 4;
constexpr int kThreads = COLUMN_PARTS >= 4 ? 256 : kLanes > 128 ? kLanes : 128;
constexpr int kGroups = kThreads / kLanes;                             // parts at a time
constexpr int kBatch = COLUMN_PARTS >= 4 ? 8 : COLUMN_PARTS == 2 ? 4 : 2;
static_assert(kVPadded % (4 * COLUMN_PARTS) == 0 && kGroups >= 1, "lanes");

__device__ void fill_zeros(const AttentionParams& p, const SplitItem& entry, int index, int of) {
  for (i64 row = entry.row0 + index; row < (i64)entry.row0 + entry.rows; row += of) {
    u16* const output = p.output + packed_row_offset(row, p.num_heads, p.output_stride, V_HEAD_SIZE);
    for (int c = threadIdx.x; c < V_HEAD_SIZE; c += kThreads) output[c] = 0;
    if (p.lse && threadIdx.x == 0) p.lse[row] = kMinusInfinity;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, COLUMN_PARTS == 1 ? 1024 / kThreads : 1) SYMBOL(const __grid_constant__ AttentionParams p) {
  __shared__ float group_sum[kGroups][kColumns + 4];
  __shared__ float group_max[kGroups], group_weight[kGroups];
  const int tid = threadIdx.x, group = tid / kLanes, lane = tid % kLanes;
  const int rows = p.num_heads < ROW_TILE ? ROW_TILE : p.num_heads;   // that an item may have
  const int tasks = rows * COLUMN_PARTS;                               // of an entry
  let_next_kernel_start();
  wait_for_previous_kernels();
  const bool vectors = output_takes_vectors(p);
  const int step = p.chunk ? 1 : 2;   // slots between parts
  for (u32 task = blockIdx.x;; task += gridDim.x) {
    const u32 k = task / (u32)tasks, within = task - k * tasks;
    const SplitItem entry = p.splits[k];
    if (entry.parts < 0) return;
    if (entry.parts == 0) { fill_zeros(p, entry, within, tasks); continue; }
    const int row = within / COLUMN_PARTS, column_part = within % COLUMN_PARTS, column = column_part * kColumns + lane * 4;
    if (row >= entry.rows) continue;
    const i64 tile_row = (i64)(row / ROW_TILE) * ROW_TILE + row % ROW_TILE, slot_rows = (i64)p.row_tiles * ROW_TILE;
    float top = kStartMax, weight = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (group < kGroups)
      for (int first = group; first < entry.parts; first += kBatch * kGroups) {
        float lse[kBatch];
        float4 v[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; u++) {
          const int part = first + u * kGroups;
          const i64 slot = (entry.slot + (i64)part * step + (part == 0 ? entry.adjust : 0)) * slot_rows + tile_row;
          lse[u] = kMasked;
          v[u] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (part < entry.parts) {
            lse[u] = p.partial_lse[slot];
            v[u] = *(const float4*)(p.partial_output + slot * kVPadded + column);
          }
        }
        float new_top = top;
#pragma unroll
        for (int u = 0; u < kBatch; u++) new_top = fmaxf(new_top, lse[u]);
        const float rescale = exp2_fast(top - new_top);
        top = new_top;
        sum.x *= rescale; sum.y *= rescale; sum.z *= rescale; sum.w *= rescale; weight *= rescale;
#pragma unroll
        for (int u = 0; u < kBatch; u++) {
          const float w = lse[u] > kStartMax ? exp2_fast(lse[u] - new_top) : 0.f;
          weight += w; sum.x += v[u].x * w; sum.y += v[u].y * w; sum.z += v[u].z * w; sum.w += v[u].w * w;
        }
      }
    if (kGroups > 1) {
      __syncthreads();
      if (group < kGroups) {
        *(float4*)&group_sum[group][lane * 4] = sum;
        if (lane == 0) { group_max[group] = top; group_weight[group] = weight; }
      }
      __syncthreads();
    }
    if (group != 0) continue;
    if (kGroups > 1) {
      sum = make_float4(0.f, 0.f, 0.f, 0.f);
      weight = 0.f;
      top = kStartMax;
#pragma unroll
      for (int i = 0; i < kGroups; i++) top = fmaxf(top, group_max[i]);
#pragma unroll
      for (int i = 0; i < kGroups; i++) {
        const float w = exp2_fast(group_max[i] - top);
        const float4 v = *(const float4*)&group_sum[i][lane * 4];
        weight += w * group_weight[i]; sum.x += w * v.x; sum.y += w * v.y; sum.z += w * v.z; sum.w += w * v.w;
      }
    }
    const float inverse = weight > 0.f ? 1.f / weight : 0.f;
    u16* const output = p.output + packed_row_offset(entry.row0 + row, p.num_heads, p.output_stride, V_HEAD_SIZE) + column;
    store_columns(output, column, make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse), vectors);
    if (p.lse && column_part == 0 && lane == 0)
      p.lse[(i64)entry.row0 + row] = weight > 0.f ? (top + log2_fast(weight)) * kLn2 : kMinusInfinity;
  }
}
