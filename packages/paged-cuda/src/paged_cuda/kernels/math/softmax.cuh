// From a dot product to a logit, and the pieces of an online softmax in float32.
#include "layout/params.cuh"
#include "math/partial.cuh"

// tanh by the exponential: the hardware's approximate tanh is off by 2^-11, which a cap of 50 turns into 0.02.
__device__ __forceinline__ float tanh_by_exp(float x) { return 1.0f - 2.0f / (1.0f + expf(2.0f * x)); }

__device__ __forceinline__ float logit(float dot, float scale, float softcap) {
  return softcap > 0.0f ? softcap * tanh_by_exp(dot * (scale / softcap)) : dot * scale;
}

// exp(x - maximum); zero where nothing finite has been seen yet, as -inf minus -inf is not a number.
__device__ __forceinline__ float weight_of(float x, float maximum) {
  return x == kMinusInfinity ? 0.0f : expf(x - maximum);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
