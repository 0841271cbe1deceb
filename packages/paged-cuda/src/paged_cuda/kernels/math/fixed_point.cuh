// Values of partials as 16-bit integers times a scale: half the bytes of float32, as writing and reading them takes as long as that
// many bytes take.
//
// The scale is the largest magnitude of the values that share it over 32,767: off by some 2^-16 of that magnitude, about what two-term
// weights leave as well. A value that is not finite makes all of them not a number; values all under 1e-34 become zeros.
#include "ptx/base2.cuh"

constexpr float kFixedBias = 8388608.f + 32768.f;   // 2^23 + 2^15: the sum's low 16 bits are the integer, offset by 2^15

// The larger of a magnitude and another number's; not a number if either is none.
__device__ __forceinline__ float larger_magnitude(float most, float x) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(most), "f"(fabsf(x)));
  return y;
}
// Of the four lanes of a quad.
__device__ __forceinline__ float largest_of_quad(float most) {
  most = larger_magnitude(most, __shfl_xor_sync(~0u, most, 1));
  return larger_magnitude(most, __shfl_xor_sync(~0u, most, 2));
}
// What values are multiplied by, and what the integers are to be multiplied by. The reciprocal is of a number so far from both ends of
// the range that neither it nor its argument is flushed to zero.
__device__ __forceinline__ float fixed_factor(float most) { return most < 1e-34f ? 0.f : 32767.f / 256.f * reciprocal_fast(most * (1.f / 256.f)); }
__device__ __forceinline__ float fixed_scale(float most) { return most * (1.f / 32767.f) + (most - most); }
__device__ __forceinline__ u32 pack_fixed(float a, float b, float factor) {
  const u32 low = __float_as_uint(fmaf(a, factor, kFixedBias)), high = __float_as_uint(fmaf(b, factor, kFixedBias));
  return __byte_perm(low, high, 0x5410);
}
__device__ __forceinline__ float fixed_low(u32 word) { return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7610)) - kFixedBias; }
__device__ __forceinline__ float fixed_high(u32 word) { return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7632)) - kFixedBias; }
