// Kernels of known bytes: fill with normal numbers, read, copy, and a digest of what another kernel wrote.
//
// Counts are in 16-byte words. Every kernel strides over them with the whole grid, so any launch shape is right.
#include "types.cuh"

struct Span {
  uint4* out;
  const uint4* source;
  u64 words;
  u64 seed;
  u64* sum;
};

__device__ __forceinline__ u64 mix(u64 x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

// Two standard normal numbers of 64 random bits (Box and Muller), as two 16-bit floats of one word.
__device__ __forceinline__ u32 normal_pair(u64 bits) {
  const float radius = sqrtf(-2.f * __logf(((u32)bits + 1.f) * 2.3283064e-10f));
  float sine, cosine;
  __sincosf((u32)(bits >> 32) * 1.4629181e-9f, &sine, &cosine);
  u32 pair;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(radius * sine), "f"(radius * cosine));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(radius * sine), "f"(radius * cosine));
#endif
  return pair;
}

extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ Span span) {
  for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < span.words; i += gridDim.x * 256ull) {
    const u64 first = span.seed + 4 * i;
    span.out[i] = make_uint4(normal_pair(mix(first)), normal_pair(mix(first + 1)), normal_pair(mix(first + 2)),
                             normal_pair(mix(first + 3)));
  }
}

__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 v;
  // Volatile keeps the loads together, ahead of their use.
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address));
  return v;
}

constexpr i32 kAhead = 8;  // independent loads of a thread

// Adds the exclusive or of all 32-bit words to `sum`: nothing that was not read can give it.
extern "C" __global__ void read(const __grid_constant__ Span span) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u32 x = 0;
  for (; i + (kAhead - 1) * step < span.words; i += kAhead * step) {
    uint4 v[kAhead];
#pragma unroll
    for (i32 k = 0; k < kAhead; k++) v[k] = load_once(span.source + i + k * step);
#pragma unroll
    for (i32 k = 0; k < kAhead; k++) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < span.words; i += step) {
    const uint4 v = load_once(span.source + i);
    x ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  x = __reduce_xor_sync(0xffffffffu, x);
  if ((threadIdx.x & 31) == 0) atomicXor((u32*)span.sum, x);
}

extern "C" __global__ void copy(const __grid_constant__ Span span) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + (kAhead - 1) * step < span.words; i += kAhead * step) {
    uint4 v[kAhead];
#pragma unroll
    for (i32 k = 0; k < kAhead; k++) v[k] = load_once(span.source + i + k * step);
#pragma unroll
    for (i32 k = 0; k < kAhead; k++) span.out[i + k * step] = v[k];
  }
  for (; i < span.words; i += step) span.out[i] = load_once(span.source + i);
}

__device__ __forceinline__ u32 not_finite(u32 pair) {
  const u32 exponent = BF16 ? 0x7f80u : 0x7c00u;
  return ((pair & exponent) == exponent) + (((pair >> 16) & exponent) == exponent);
}

// sum[0]: a digest of values and places; sum[1]: how many 16-bit floats are infinite or no number.
extern "C" __global__ void __launch_bounds__(256) digest(const __grid_constant__ Span span) {
  u64 sum = 0;
  u32 wild = 0;
  for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < span.words; i += gridDim.x * 256ull) {
    const uint4 v = span.source[i];
    sum += mix((((u64)v.y << 32) | v.x) + 2 * i) + mix((((u64)v.w << 32) | v.z) + 2 * i + 1);
    wild += not_finite(v.x) + not_finite(v.y) + not_finite(v.z) + not_finite(v.w);
  }
  atomicAdd(span.sum, sum);
  if (wild) atomicAdd(span.sum + 1, (u64)wild);
}

// Keeps one thread busy for `words` clock cycles; with 0 it is the smallest kernel there is.
extern "C" __global__ void spin(const __grid_constant__ Span span) {
  const i64 begin = clock64();
  while (clock64() - begin < (i64)span.words) {}
}
