// Products of 16-bit floats by wgmma from shared memory, and nothing else: what the instruction can do at most.
//
// Each of two warpgroups adds A_k B_k, k = 0 to 3, to the same float32 sums, so the result is known: `rounds` times
// sum_k A_k B_k. A is 128 x 64, of which a warpgroup takes 64 rows; B is 256 x 64 with its columns as rows. Both lie in
// shared memory without a swizzle, as core matrices of 8 rows of 16 bytes, those of one k next to each other.
#include "types.cuh"

struct Products {
  const u16* a;
  const u16* b;
  float* out;
  u64 rounds;
};

constexpr i32 kDepth = 64, kColumns = 256, kRows = 64;
constexpr u32 kCore = 128;    // bytes of a core matrix
constexpr i32 kTogether = 4;  // rounds between two waits; `rounds` is a multiple of it

// Bytes between core matrices that follow each other in k (leading) and in rows or columns (stride).
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(stride >> 4) << 32);
}

__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b) {
#if BF16
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
#else
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
#endif
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
      "}, %128, %129, 1, 1, 1, 0, 0;"
      :
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b));
}

// Rows of kDepth floats to core matrices: row r, channel c goes to core (c / 8, r / 8), row r % 8 of it.
__device__ __forceinline__ void stage(unsigned char* to, const u16* from, i32 rows) {
  for (i32 i = threadIdx.x; i < rows * kDepth / 8; i += 256) {
    const i32 row = i / (kDepth / 8), chunk = i % (kDepth / 8);
    *(uint4*)(to + (chunk * (rows / 8) + row / 8) * kCore + row % 8 * 16) = *(const uint4*)(from + row * kDepth + chunk * 8);
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) matmul(const __grid_constant__ Products p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr i32 kA = 2 * kRows * kDepth * 2;
  stage(shared, p.a, 2 * kRows);
  stage(shared + kA, p.b, kColumns);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const i32 group = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const u32 base = (u32)__cvta_generic_to_shared(shared);
  constexpr u32 kLeadA = 2 * kRows / 8 * kCore, kLeadB = kColumns / 8 * kCore;
  const u64 a = descriptor(base + group * (kRows / 8) * kCore, kLeadA, kCore), b = descriptor(base + kA, kLeadB, kCore);
  float d[128];
#pragma unroll
  for (i32 i = 0; i < 128; i++) d[i] = 0.f;
#pragma unroll 1
  for (u64 i = 0; i < p.rounds; i += kTogether) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (i32 k = 0; k < kTogether * kDepth / 16; k++) {
      const i32 slab = k % (kDepth / 16);
      multiply(d, a + slab * (2 * kLeadA >> 4), b + slab * (2 * kLeadB >> 4));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  float* out = p.out + ((i64)blockIdx.x * 2 + group) * kRows * kColumns;
#pragma unroll
  for (i32 i = 0; i < 128; i++) {
    const i32 row = warp * 16 + (lane >> 2) + 8 * ((i >> 1) & 1), column = (i >> 2) * 8 + 2 * (lane & 3) + (i & 1);
    out[row * kColumns + column] = d[i];
  }
}
