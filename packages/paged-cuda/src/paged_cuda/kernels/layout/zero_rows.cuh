// Zeros of tokens that belong to no request.
#include "layout/params.cuh"
#include "layout/schedule.cuh"
#include "math/partial.cuh"

// Every `of`-th of the entry's rows, from `index` on, by a worker of so many threads.
__device__ void zero_rows(const AttentionParams& p, const SplitItem& entry, int index, int of, int thread, int threads) {
  for (i64 row = (i64)entry.row0 + index; row < (i64)entry.row0 + entry.rows; row += of) {
    u16* const output = p.output + packed_row_offset(row, p.num_heads, p.output_stride, V_HEAD_SIZE);
    for (int c = thread; c < V_HEAD_SIZE; c += threads) output[c] = 0;
    if (p.lse && thread == 0) p.lse[row] = kMinusInfinity;
  }
}
