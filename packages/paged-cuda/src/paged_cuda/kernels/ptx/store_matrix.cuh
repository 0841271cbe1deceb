// stmatrix (sm_90): four 8 x 8 matrices of 16-bit elements from A-fragment registers to shared memory.
#include "layout/types.cuh"

__device__ __forceinline__ void store_matrix_x4(u32 address, const u32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
