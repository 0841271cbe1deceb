// The smallest pairs of a writing and a reading warp: which hand-overs racecheck follows, and which it reports though right.
//
// Warp 0 writes 32 words (or 16-byte chunks), warp 1 reads them, and the next round writes over them. A kernel differs from
// the others only in who arrives on the two mbarriers. Its name says so.
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 address_of(const void* p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}
__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void store(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
__device__ __forceinline__ u32 load(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_matrix(u32 a) {
  u32 r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
  return r[0] ^ r[1] ^ r[2] ^ r[3];
}

enum Arrival { kNobody, kLaneZero, kEveryLane, kCopies };   // kLaneZero: after __syncwarp

template <Arrival kWriter, Arrival kReader>
__device__ __forceinline__ void hand_over(const u32* source, u32* out) {
  __shared__ __align__(16) u32 data[128];
  __shared__ __align__(8) u64 barriers[2];
  const u32 full = address_of(barriers), empty = full + 8, base = address_of(data), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    init(full, kWriter == kLaneZero ? 1 : 32);
    init(empty, kReader == kLaneZero ? 1 : 32);
  }
  __syncthreads();
  u32 sum = 0;
  for (u32 i = 0; i < 6; i++) {
    if (warp == 0) {
      if (kReader != kNobody) wait(empty, (i & 1) ^ 1);
      if (kWriter == kCopies) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(base + lane * 16), "l"(source + i * 128 + lane * 4) : "memory");
        arrive_after_copies(full);
      } else {
        store(base + lane * 4, i + lane);
      }
      if (kWriter == kLaneZero) { __syncwarp(); if (lane == 0) arrive(full); }
      if (kWriter == kEveryLane) arrive(full);
    } else {
      if (kWriter != kNobody) wait(full, i & 1);
      sum += kWriter == kCopies ? load_matrix(base + lane * 16) : load(base + ((lane + 5) & 31) * 4);
      if (kReader == kLaneZero) { __syncwarp(); if (lane == 0) arrive(empty); }
      if (kReader == kEveryLane) arrive(empty);
    }
  }
  if (warp) out[lane] = sum;
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#define PATTERN(name, ...) \
  extern "C" __global__ void name(const u32* source, u32* out) { hand_over<__VA_ARGS__>(source, out); }
PATTERN(reported_nobody_arrives, kNobody, kNobody)
PATTERN(reported_lane_zero_of_the_writer_arrives, kLaneZero, kEveryLane)
PATTERN(reported_lane_zero_of_the_reader_arrives, kEveryLane, kLaneZero)
PATTERN(reported_copies_and_lane_zero_of_the_reader, kCopies, kLaneZero)
PATTERN(clean_every_lane_arrives, kEveryLane, kEveryLane)
PATTERN(clean_copies_arrive, kCopies, kEveryLane)
