// The partials of the mma.sync kernels, row after row: 16-bit integers (math/fixed_point.cuh), whose scale is that of their row and their
// eighth of the columns, as a warp of the wide kernel has them.
//
// Beside them, for each row and eighth: the log-sum-exp (base 2), the same in all eighths, and the scale. Who merges an eighth reads both
// at once.
#include "layout/output.cuh"
#include "math/fixed_point.cuh"

constexpr int kEighths = 8, kScaleColumns = kVPadded / kEighths, kFacts = 16;   // of a row
static_assert(kFacts == 2 * kEighths, "two for each eighth");

// `at`: a row, counted over all slots and their tiles.
__device__ __forceinline__ u32* partial_words(const AttentionParams& p, u64 at, int column) { return (u32*)p.partial_output + (at * kVPadded + column) / 2; }
__device__ __forceinline__ float2* partial_facts(const AttentionParams& p, u64 at, int eighth) { return (float2*)(p.partial_facts + at * kFacts) + eighth; }
