// Keeping the blocks of a grid level.
//
// Where memory is the limit some multiprocessors get more of it than others: with equal slices the first block was done after five
// sixths of the last one's time, and at the end the memory was half idle. So a block waits a little before it asks for more, unless it is most
// of a tile behind the average of all. That changes when bytes are fetched, never what is computed.
//
// One lane of a warp of its own counts the block's tiles and compares. The loading warp asks it for leave every kAskTiles
// tiles, one ask ahead, so that its copies do not wait for an answer from far away. The wait ends after kMostLooks looks in any case:
// nothing hangs on another block. Nor does anybody wait before all blocks have started, as some may lack a multiprocessor,
// or where the tensor cores are the limit: in a slice whose first item takes two-term weights, and where several row tiles read the same keys
// (`one_tile_reads`), when nobody counts at all.
//
// A block counts the tiles that it has asked for before it adds the last of them, so one that is level finds itself a tile ahead: kFewTiles
// lets it wait even when it is a little behind. At 0 all wait for each other, and a step takes half as long again or twice as long.
//
// progress[0]: blocks started since the schedule was made. Launches of this kernel follow each other, so the quotient by the grid is the number
// of a launch, up to 2^32 blocks (beyond, blocks may wait in vain, for kMostLooks looks). progress[1]: KV tiles begun since then. The schedule kernel
// clears both.
#include "layout/params.cuh"
#include "ptx/barrier.cuh"

constexpr int kAskShift = 1, kAskTiles = 1 << kAskShift, kFreeAsks = 2, kMostLooks = 16;
constexpr float kFewTiles = 0.25f;

__device__ __forceinline__ u32 add_relaxed(u32* at, u32 x) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"((u64)at), "r"(x) : "memory");
  return old;
}
__device__ __forceinline__ u32 load_relaxed(const u32* at) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"((u64)at) : "memory");
  return x;
}

// Counts this block in, after the kernels before this one, and returns the number of the launch.
__device__ __forceinline__ u32 start_block(const AttentionParams& p) { return add_relaxed(p.progress, 1) / (gridDim.x * gridDim.y); }

// A slice's asks count from 0; the last one is made with its last tile.
__device__ __forceinline__ int last_ask_of(int tiles) { return tiles - 1 >> kAskShift; }

// The loading warp's side, with `left` of `tiles` to go. Leave n is for the tiles behind ask n + 1.
__device__ __forceinline__ void ask_leave(int tiles, int left, u32 asked, u32 granted, bool speaks) {
  if (left & (kAskTiles - 1)) return;
  const int ask = last_ask_of(tiles) - (left >> kAskShift);
  if (ask > 0) barrier_wait(granted, (ask - 1) & 1);   // before the next ask: a leave that nobody has looked at must not be followed by another
  __syncwarp();   // no lane may still look for a phase that another one's ask lets end
  if (speaks) barrier_arrive(asked);
}

// The other side, one lane. `all`: tiles of all blocks. The first leaves are free, as the pipeline is not full yet, and so are the last two,
// behind which there is nothing to load.
__device__ __forceinline__ void grant_leave(const AttentionParams& p, int tiles, u32 all, bool paces, u32 asked, u32 granted) {
  const u32 launch = start_block(p), before = launch * all;
  const float share = (float)tiles / (float)all;
  bool looks = false;
#pragma unroll 1
  for (int ask = 0; ask <= last_ask_of(tiles); ask++) {
    const int begun = tiles - (last_ask_of(tiles) - ask << kAskShift);
    barrier_wait(asked, ask & 1);
    if (ask < kFreeAsks) barrier_arrive(granted);
    u32 now = add_relaxed(p.progress + 1, min(begun, kAskTiles));
    if (ask < kFreeAsks) continue;
    if (ask + 1 >= last_ask_of(tiles)) looks = false;
    else if (paces && !looks) looks = (i32)(load_relaxed(p.progress) - (launch + 1) * gridDim.x * gridDim.y) >= 0;
#pragma unroll 1
    for (int look = looks ? kMostLooks : 0; look > 0 && (float)begun - share * (float)(i32)(now - before) >= kFewTiles; look--) now = load_relaxed(p.progress + 1);
    barrier_arrive(granted);
  }
}
