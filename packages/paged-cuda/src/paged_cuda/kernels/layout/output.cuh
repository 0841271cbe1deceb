// Where output rows go: V_HEAD_SIZE columns, padded to whole 128-column groups inside the kernels.
#include "layout/params.cuh"
#include "ptx/base2.cuh"

constexpr int kVPadded = (V_HEAD_SIZE + 127) / 128 * 128;

// Whether four columns of a row lie on eight bytes.
__device__ __forceinline__ bool output_takes_vectors(const AttentionParams& p) {
  return V_HEAD_SIZE % 4 == 0 && p.output_stride % 4 == 0 && (u64)p.output % 8 == 0;
}

// Four neighbouring columns of an output row, of which those below V_HEAD_SIZE exist.
__device__ __forceinline__ void store_columns(u16* at, int column, float4 v, bool vectors) {
  const u32 low = pack_pair(v.x, v.y), high = pack_pair(v.z, v.w);
  if (vectors) {
    if (V_HEAD_SIZE == kVPadded || column < V_HEAD_SIZE) *(uint2*)at = make_uint2(low, high);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (column + e < V_HEAD_SIZE) at[e] = (u16)((e < 2 ? low : high) >> (e & 1) * 16);
}

// Two neighbouring columns of an output row, of which those below V_HEAD_SIZE exist.
__device__ __forceinline__ void store_pair(u16* row, int column, float a, float b, bool vectors) {
  const u32 both = pack_pair(a, b);
  if (vectors) {
    if (V_HEAD_SIZE == kVPadded || column < V_HEAD_SIZE) *(u32*)(row + column) = both;
    return;
  }
  if (column < V_HEAD_SIZE) row[column] = (u16)both;
  if (column + 1 < V_HEAD_SIZE) row[column + 1] = (u16)(both >> 16);
}
