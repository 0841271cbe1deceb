// The partials of the mma.sync kernels, row after row: 16-bit integers (math/fixed_point.cuh), whose scale is that of their row and their
// eighth of the columns, as a warp of the wide kernel has them.
//
// Beside them, for each row, kFacts numbers: the log-sum-exp (base 2) first, the scales from kScales on.
#include "layout/output.cuh"
#include "math/fixed_point.cuh"

constexpr int kFacts = 16, kScales = 8, kScaleColumns = kVPadded / 8;

// `at`: a row, counted over all slots and their tiles.
__device__ __forceinline__ u32* partial_words(const AttentionParams& p, u64 at, int column) { return (u32*)p.partial_output + (at * kVPadded + column) / 2; }
__device__ __forceinline__ float* partial_facts(const AttentionParams& p, u64 at) { return p.partial_facts + at * kFacts; }
__device__ __forceinline__ float* partial_scale(const AttentionParams& p, u64 at, int column) { return partial_facts(p, at) + kScales + column / kScaleColumns; }
