// Debug kernels count what the host cannot see and keep the first offender. Release kernels compile it away.
//
// violations[0] is the count. violations[1] starts at all ones and keeps the minimum of
// (token << 36 | kind << 32 | value), so "first" means the lowest token whatever order the blocks ran in.
#include "layout/types.cuh"

enum Violation : u32 {
  kNone = 0,
  kSlotOutOfRange = 1,
  kBlockOutOfRange = 2,
  kNegativePast = 3,
  kPositionBeyondRotary = 4,
  kPositionBeyondTable = 5,
};

// `reporter` is true in one thread a fact, so that the count counts facts.
__device__ __forceinline__ void report(bool reporter, u64* violations, Violation kind, i64 token, i64 value) {
#if DEBUG
  if (!reporter) return;
  atomicAdd(violations, 1ull);
  atomicMin(violations + 1, (u64)token << 36 | (u64)kind << 32 | (u64)(u32)value);
#endif
}
