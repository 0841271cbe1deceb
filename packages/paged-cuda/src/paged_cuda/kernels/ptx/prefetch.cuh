// Prefetches into the L2 cache (sm_90 and later; nothing elsewhere).
//
// The L2 cache is where all multiprocessors see each other's stores. So bytes may be asked for while an earlier kernel still writes
// them: who loads them after it has waited for that kernel finds what was written.
#include "layout/types.cuh"

// `from` and `bytes` are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"((u64)from), "r"(bytes) : "memory");
#endif
}
