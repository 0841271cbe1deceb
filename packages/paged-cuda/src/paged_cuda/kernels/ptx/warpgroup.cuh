// wgmma (sm_90a): one warpgroup multiplies a 64-row A, from registers or shared memory, by a B in shared memory.
//
// Accumulators: warp w of the group and lane l hold rows 16 w + l / 4 (d[4 j], d[4 j + 1]) and 8 below (d[4 j + 2], d[4 j + 3]),
// columns 8 j + 2 (l % 4) and the next. Shared operands use the 128-byte swizzle in slabs of 64 16-bit channels; their
// descriptors advance by plain addition, as the hardware swizzles address bits. BF16 selects the format.
#include "layout/types.cuh"

// What generic stores wrote to shared memory becomes visible to wgmma and bulk copies; by each thread that stored.
__device__ __forceinline__ void publish_to_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kOpenGroups>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOpenGroups) : "memory");
}

// Changes the registers of each thread of a warpgroup, whose threads got 128 at launch.
template <int kRegisters>
__device__ __forceinline__ void set_registers() {
  if constexpr (kRegisters > 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of a swizzled operand: `leading` bytes between slabs (used where M or N is the contiguous dimension), 1024
// bytes between groups of eight rows.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// The operand so many 16-byte words behind another one. The address never leaves the lower half, so nothing is carried.
__device__ __forceinline__ u64 advance_descriptor(u64 descriptor, u32 words) {
  return (descriptor & 0xffffffff00000000ull) | (u32)((u32)descriptor + words);
}

#if BF16
#define WGMMA_TYPES ".f32.bf16.bf16 "
#else
#define WGMMA_TYPES ".f32.f16.f16 "
#endif
#define ADD4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define SET4(i) "=f"(d[i]), "=f"(d[(i) + 1]), "=f"(d[(i) + 2]), "=f"(d[(i) + 3])

// Scores: S = (or +=) A K^T with KV_TILE columns. Starting with a pure output, not with a false predicate, keeps the compiler
// from carrying the stale accumulator into an open group.
#if KV_TILE == 32
__device__ __forceinline__ void start_scores(float* d, const u32* a, u64 b) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16" WGMMA_TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
               "{%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
               : SET4(0), SET4(4), SET4(8), SET4(12)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void add_scores(float* d, const u32* a, u64 b) {
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16" WGMMA_TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
               "{%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
               : ADD4(0), ADD4(4), ADD4(8), ADD4(12)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void add_scores_shared(float* d, u64 a, u64 b) {
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16" WGMMA_TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
               "%16, %17, p, 1, 1, 0, 0; }"
               : ADD4(0), ADD4(4), ADD4(8), ADD4(12)
               : "l"(a), "l"(b));
}
#else
__device__ __forceinline__ void start_scores(float* d, const u32* a, u64 b) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
               "%26,%27,%28,%29,%30,%31}, "
               "{%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
               : SET4(0), SET4(4), SET4(8), SET4(12), SET4(16), SET4(20), SET4(24), SET4(28)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void add_scores(float* d, const u32* a, u64 b) {
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
               "%26,%27,%28,%29,%30,%31}, "
               "{%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
               : ADD4(0), ADD4(4), ADD4(8), ADD4(12), ADD4(16), ADD4(20), ADD4(24), ADD4(28)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void add_scores_shared(float* d, u64 a, u64 b) {
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
               "%26,%27,%28,%29,%30,%31}, "
               "%32, %33, p, 1, 1, 0, 0; }"
               : ADD4(0), ADD4(4), ADD4(8), ADD4(12), ADD4(16), ADD4(20), ADD4(24), ADD4(28)
               : "l"(a), "l"(b));
}
#endif

// Outputs: O = (or +=) P V, V with its rows as the reduction: the transposed B reads the very bytes that were K.
__device__ __forceinline__ void add_outputs_128(float* d, u64 a, u64 b, bool add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
               "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"
               "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
               "%64, %65, p, 1, 1, 0, 1; }"
               : ADD4(0), ADD4(4), ADD4(8), ADD4(12), ADD4(16), ADD4(20), ADD4(24), ADD4(28),
        ADD4(32), ADD4(36), ADD4(40), ADD4(44), ADD4(48), ADD4(52), ADD4(56), ADD4(60)
               : "l"(a), "l"(b), "r"((u32)add));
}
__device__ __forceinline__ void add_outputs_64(float* d, u64 a, u64 b, bool add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
               "%26,%27,%28,%29,%30,%31}, "
               "%32, %33, p, 1, 1, 0, 1; }"
               : ADD4(0), ADD4(4), ADD4(8), ADD4(12), ADD4(16), ADD4(20), ADD4(24), ADD4(28)
               : "l"(a), "l"(b), "r"((u32)add));
}
#undef ADD4
#undef SET4
#undef WGMMA_TYPES
