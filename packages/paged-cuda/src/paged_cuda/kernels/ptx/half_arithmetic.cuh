// One 16-bit floating point instruction a function, on raw bit patterns. BF16 selects the format.
#include "layout/types.cuh"

__device__ __forceinline__ float widen(u16 x) {
#if BF16
  return __uint_as_float((u32)x << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#endif
}

__device__ __forceinline__ u16 narrow(float x) {
  u16 y;
#if BF16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
  return y;
}

__device__ __forceinline__ u16 fma_rn(u16 a, u16 b, u16 c) {
  u16 d;
#if BF16
  asm("fma.rn.bf16 %0, %1, %2, %3;" : "=h"(d) : "h"(a), "h"(b), "h"(c));
#else
  asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(d) : "h"(a), "h"(b), "h"(c));
#endif
  return d;
}

__device__ __forceinline__ u16 negate(u16 x) { return x ^ 0x8000; }

// sm_80 has no 16-bit bfloat multiply or add; adding -0, or multiplying by 1, in the fused form rounds once too.
__device__ __forceinline__ u16 mul_rn(u16 a, u16 b) { return fma_rn(a, b, 0x8000); }

__device__ __forceinline__ u16 add_rn(u16 a, u16 b) {
#if BF16
  constexpr u16 kOne = 0x3F80;
#else
  constexpr u16 kOne = 0x3C00;
#endif
  return fma_rn(a, kOne, b);
}
