// cp.async: 16 bytes from global to shared memory without registers, past the L1.
#include "layout/types.cuh"

// `bytes` is 16 or 0. With 0 nothing is read and the 16 bytes become zeros, so a dead row never brings a NaN into 0 * V.
__device__ __forceinline__ void copy_async_16(u32 destination, const void* source, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// The same with a policy for the L2 cache.
__device__ __forceinline__ void copy_async_16(u32 destination, const void* source, u32 bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(source), "r"(bytes), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies form groups; waits until at most kPending of the thread's latest groups are under way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }
