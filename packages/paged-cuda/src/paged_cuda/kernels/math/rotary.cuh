// Rotary embedding of one channel, rounded in the tensor's own type so that cache rows equal ONNX Runtime's bits.
//
// bfloat16 rounds both products and the sum; float16 rounds the partner's product and fuses the rest.
#include "layout/params.cuh"
#include "ptx/half_arithmetic.cuh"

__device__ __forceinline__ u16 rotate(u16 x, u16 partner_product, u16 cosine) {
#if BF16
  return add_rn(mul_rn(x, cosine), partner_product);
#else
  return fma_rn(x, cosine, partner_product);
#endif
}

// Channel `channel` of a row of head_size channels at `position`; channels outside the rotary part are copied.
__device__ __forceinline__ u16 rotary_channel(const AttentionParams& p, const u16* row, i32 channel, i64 position) {
  const i32 r = channel - p.rotary_offset, half = p.rotary_dim / 2;
  if (r < 0 || r >= p.rotary_dim) return row[channel];
  const bool first = p.rotary_interleaved ? r % 2 == 0 : r < half;
  const i32 step = p.rotary_interleaved ? 1 : half;
  const i32 column = p.rotary_interleaved ? r / 2 : first ? r : r - half;
  const u16 partner = row[first ? channel + step : channel - step];
  const u16 sine = p.sin_cache[position * half + column], cosine = p.cos_cache[position * half + column];
  return rotate(row[channel], mul_rn(first ? negate(partner) : partner, sine), cosine);
}
