// Products of 16-bit floats by mma.sync from registers, and nothing else: what the instruction can do at most.
//
// Every warp adds A_k B, k = 0 to 3, to the same float32 sums, so the result is known: `rounds` times (sum A_k) B.
// A is four tiles of 16 x 16, B is 16 x 64 with its columns contiguous.
#include "types.cuh"

struct Products {
  const u16* a;
  const u16* b;
  float* out;
  u64 rounds;
};

constexpr i32 kTiles = 8;  // independent sums of a warp

__device__ __forceinline__ void multiply(float* c, const u32* a, const u32* b) {
#if BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

extern "C" __global__ void __launch_bounds__(256) matmul(const __grid_constant__ Products p) {
  const i32 lane = threadIdx.x & 31, group = lane >> 2, pair = 2 * (lane & 3);
  u32 a[4][4], b[kTiles][2];
  for (i32 k = 0; k < 4; k++)
    for (i32 r = 0; r < 4; r++)
      a[k][r] = *(const u32*)(p.a + k * 256 + (group + 8 * (r & 1)) * 16 + pair + 8 * (r >> 1));
  for (i32 t = 0; t < kTiles; t++)
    for (i32 r = 0; r < 2; r++) b[t][r] = *(const u32*)(p.b + (t * 8 + group) * 16 + pair + 8 * r);
  float c[kTiles][4] = {};
#pragma unroll 1
  for (u64 i = 0; i < p.rounds; i++)
#pragma unroll
    for (i32 k = 0; k < 4; k++)
#pragma unroll
      for (i32 t = 0; t < kTiles; t++) multiply(c[t], a[k], b[t]);
  float* out = p.out + (blockIdx.x * 8ll + (threadIdx.x >> 5)) * 16 * 64;
  for (i32 t = 0; t < kTiles; t++)
    for (i32 r = 0; r < 4; r++) out[(group + 8 * (r >> 1)) * 64 + t * 8 + pair + (r & 1)] = c[t][r];
}
