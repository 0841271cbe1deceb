// The partials of the wgmma kernel, as its accumulators lie: 16-bit integers (math/fixed_point.cuh), whose scale is that of their row and
// their half of the columns.
//
// Sixteen rows of a tile lie together: (16 columns, lane of a warp, four words). Lane 4 i + j has rows i and i + 8 and of each eight
// columns those from 2 j on: words are (first eight, row i), (first eight, row i + 8), (last eight, i), (last eight, i + 8).
// Beside them, for each row and half: the log-sum-exp (base 2) and the scale.
#include "layout/output.cuh"
#include "math/fixed_point.cuh"

constexpr int kFacts = 4;   // of a row
// Rows a multiple of sixteen apart lie as if each took so many bytes.
constexpr u64 kRowBytes = kVPadded * 2, kFactBytes = kFacts * 4;

// `at`: a row, counted over all slots and their tiles.
__device__ __forceinline__ u32* partial_words(const AttentionParams& p, u32 at, int column, int lane_of_row) {
  return (u32*)p.partial_output + (u64)(at / 16) * (8 * kVPadded) + column / 16 * 128 + (at % 8) * 16 + lane_of_row * 4;
}
__device__ __forceinline__ float* partial_facts(const AttentionParams& p, u32 at, int half) { return p.partial_facts + (u64)at * kFacts + half * 2; }
