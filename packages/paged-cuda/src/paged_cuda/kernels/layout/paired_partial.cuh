// The partials of the wgmma kernel, as its accumulators lie: half the bytes of float32, as writing them takes as long as it takes to
// write that many bytes.
//
// A value is a 16-bit integer times a scale of its row and its half of the columns, the largest magnitude there over 32,767: off by at
// most 2^-16 of that magnitude, about what two-term weights leave as well. A value that is not finite makes its half of the row not a
// number; a half of values under 1e-34 is zeros.
// Sixteen rows of a tile lie together: (16 columns, lane of a warp, four words). Lane 4 i + j has rows i and i + 8 and of each eight
// columns those from 2 j on: words are (first eight, row i), (first eight, row i + 8), (last eight, i), (last eight, i + 8).
// Beside them, for each row and half: the log-sum-exp (base 2) and the scale.
#include "layout/output.cuh"

constexpr float kPartialBias = 8388608.f + 32768.f;   // 2^23 + 2^15: the sum's low 16 bits are the integer, offset by 2^15

// `at`: a row, counted over all slots and their tiles.
__device__ __forceinline__ u32* partial_words(const AttentionParams& p, u32 at, int column, int lane_of_row) {
  return (u32*)p.partial_output + (u64)(at / 16) * (8 * kVPadded) + column / 16 * 128 + (at % 8) * 16 + lane_of_row * 4;
}
__device__ __forceinline__ float* partial_facts(const AttentionParams& p, u32 at, int half) { return p.partial_lse + (u64)at * 4 + half * 2; }

// The larger of a magnitude and another number's; not a number if either is none.
__device__ __forceinline__ float larger_magnitude(float most, float x) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(most), "f"(fabsf(x)));
  return y;
}
// What values are multiplied by, and what the integers are to be multiplied by. The reciprocal is of a number so far from both ends of
// the range that neither it nor its argument is flushed to zero.
__device__ __forceinline__ float partial_factor(float most) { return most < 1e-34f ? 0.f : 32767.f / 256.f * reciprocal_fast(most * (1.f / 256.f)); }
__device__ __forceinline__ float partial_scale(float most) { return most * (1.f / 32767.f) + (most - most); }
__device__ __forceinline__ u32 pack_partial(float a, float b, float factor) {
  const u32 low = __float_as_uint(fmaf(a, factor, kPartialBias)), high = __float_as_uint(fmaf(b, factor, kPartialBias));
  return __byte_perm(low, high, 0x5410);
}
// All four at once: the compiler would split a plain store where registers are short.
__device__ __forceinline__ void store_partial_words(u32* at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"((u64)at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ float partial_low(u32 word) { return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7610)) - kPartialBias; }
__device__ __forceinline__ float partial_high(u32 word) { return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7632)) - kPartialBias; }
