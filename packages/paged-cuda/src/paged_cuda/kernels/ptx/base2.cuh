// The hardware's base-2 functions and reciprocal on float32, and pairs of the 16-bit type.
#include "layout/types.cuh"

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 r;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}

__device__ __forceinline__ float2 unpack_pair(u32 x) {
#if BF16
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#else
  float2 v;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(v.x), "=f"(v.y) : "r"(x));
  return v;
#endif
}
