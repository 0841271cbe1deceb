// The loading half of the sm80 kernels: cp.async from pages into a ring of stages.
//
// A stage is KV_TILE rows of kRowBytes, chunks of 16 bytes swizzled by the row, and a mask word a row: 0, or kMasked
// where the row is a tail, lies before the window or on no page; such rows are zeros. Every thread that writes shared
// memory arrives itself on the barrier that publishes it, and every thread that reads a stage arrives on the one that
// frees it: one lane's arrival for its warp would be as right, but racecheck follows direct arrivals only.
//
// Needs of its includer: kLoaders threads, the row layout (kKPadded, kRowBytes, kSlabs, kChunks) and the offsets kKvOffset,
// kMaskOffset, kQueryOffset, kItemOffset in shared memory. Macros: HEAD_SIZE ROW_TILE KV_TILE PRODUCER_WARPS
#include "layout/schedule.cuh"
#include "math/partial.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/shared.cuh"

constexpr int kRowsPerPass = kLoaders / 8 < KV_TILE ? kLoaders / 8 : KV_TILE;   // eight threads take 128 bytes of a row
constexpr int kStageArrivals = kLoaders + kRowsPerPass, kQueryArrivals = kLoaders + 1;
constexpr bool kKeysLeave = ROW_TILE == 16 && __CUDA_ARCH__ == 900;   // the L2 cache first, where that is measured to pay
constexpr int kEarlyRows = 65536 / (HEAD_SIZE * 2);   // of keys that a slice asks for before it may load them
static_assert(KV_TILE == 16 || KV_TILE == 32 || KV_TILE == 64, "load tiles");
static_assert(kLoaders / 8 % KV_TILE == 0 || KV_TILE % (kLoaders / 8) == 0, "loader passes");

__device__ __forceinline__ bool page_is_mapped(int page, int num_blocks) { return (u32)page < (u32)num_blocks; }

// Copies the query rows of an item, swizzled like K, and its record; by kOf threads.
template <int kOf>
__device__ __forceinline__ void copy_query(const AttentionParams& p, u32 shared, const Item& i, int row_tile, int thread) {
  const int rows = min(i.rows - row_tile * ROW_TILE, ROW_TILE);
  const i64 row0 = (i64)i.row0 + row_tile * ROW_TILE;
  for (int k = thread; k < ROW_TILE * (kKPadded / 8); k += kOf) {
    const int row = k / (kKPadded / 8), c = k % (kKPadded / 8);
    const bool live = row < rows && c < kChunks;
    const u16* source = p.query;
    if (live) {
      const int rotary_c = c - p.query_first / 8;
      if (p.query_rotary && (u32)rotary_c < (u32)p.query_width / 8)
        source = p.query_rotary + (row0 + row) * p.query_width + rotary_c * 8;
      else
        source += packed_row_offset((u32)row0 + row, p.num_heads, p.query_stride, HEAD_SIZE) + c * 8;
    }
    copy_async_16(shared + kQueryOffset + row * kRowBytes + ((c ^ (row & 7)) << 4), source, live ? 16u : 0u);
  }
  if (thread == 0) {
    store_s32x4(shared + kItemOffset, i.row0, i.rows, i.past, i.first);
    store_s32x4(shared + kItemOffset + 16, i.kv_end, i.tiles, i.part, 0);
  }
}

// Walks the slice and issues the copies of one load tile after another.  Held by every loading thread.
struct Loader {
  const AttentionParams& p;
  const u32 shared, full;
  const int thread, lane, row_tile;
  const u64 policy;
  Item item, next;                 // `next` only while next_is_ahead
  int index, tile, tile_end, left, first_position;
  int chunk, pages, pages_ahead;   // 32 block-table entries, one a lane: the current ones and the next
  bool next_is_ahead = false;      // the next entries are the next item's first ones

  __device__ Loader(const AttentionParams& params, u32 shared_base, u32 full_barriers, int loader_thread, const SliceStart& start)
      : p(params), shared(shared_base), full(full_barriers), thread(loader_thread), lane(loader_thread & 31),
        row_tile(blockIdx.x % params.row_tiles), policy(leaving_first()), item(start.first), index(start.item), left(start.count) {
    enter_item();
    tile += start.offset;
    chunk = chunk_of(tile);
    pages = entries(item, chunk);
    look_ahead();
  }
  __device__ __forceinline__ int first_of(const Item& i) const { return visible_begin(i.past + i.first / p.num_heads, p.local_window_size); }
  __device__ __forceinline__ int chunk_of(int t) const { return (t * KV_TILE >> p.block_shift) >> 5; }
  __device__ __forceinline__ void enter_item() {
    first_position = first_of(item);
    tile = first_position / KV_TILE;
    tile_end = tile + item.tiles;
  }
  __device__ __forceinline__ int entries(const Item& i, int c) const {
    const int e = c * 32 + lane;
    return e < p.max_blocks && ((i64)e << p.block_shift) < i.kv_end ? p.block_table[i.request * p.table_stride + e] : -1;
  }
  __device__ __forceinline__ int first_entries(const Item& i) const { return entries(i, chunk_of(first_of(i) / KV_TILE)); }
  // A table read under load costs microseconds, so it is asked for a whole chunk ahead.
  __device__ __forceinline__ void look_ahead() {
    next_is_ahead = false;
    if (((i64)(chunk + 1) * 32 << p.block_shift) < item.kv_end) {
      pages_ahead = entries(item, chunk + 1);
    } else if (left > tile_end - tile) {
      next_is_ahead = true;
      next = p.items[index + 1];
      pages_ahead = first_entries(next);
    }
  }
  // True when the next tile begins another item, whose query rows must then be loaded.
  __device__ __forceinline__ bool at_item_end() const { return tile == tile_end; }
  __device__ __forceinline__ void next_item() {
    ++index;
    item = next_is_ahead ? next : p.items[index];
    enter_item();
    pages = next_is_ahead ? pages_ahead : first_entries(item);
    chunk = chunk_of(tile);
    look_ahead();
  }
  __device__ __forceinline__ void issue(int stage) {
    if (chunk_of(tile) != chunk) { pages = pages_ahead; chunk++; look_ahead(); }
    constexpr int kPasses = KV_TILE / kRowsPerPass;
    constexpr int kSlabStep = kLoaders / 8 / kRowsPerPass;        // threads of 8 that share a row
    const int c = thread & 7, s0 = (thread >> 3) % kSlabStep;
#pragma unroll
    for (int k = 0; k < kPasses; k++) {
      const int row = k * kRowsPerPass + (thread >> 3) / kSlabStep, position = tile * KV_TILE + row;
      const int page = __shfl_sync(~0u, pages, (position >> p.block_shift) & 31);
      const bool live = page_is_mapped(page, p.num_blocks) && position < item.kv_end && position >= first_position;
      const u16* source = p.key_cache + c * 8;
      if (live) source += (i64)page * p.page_stride + (i64)(position & ((1 << p.block_shift) - 1)) * p.row_stride;
      const u32 destination = shared + kKvOffset + (stage * KV_TILE + row) * kRowBytes + ((c ^ (row & 7)) << 4);
#pragma unroll
      for (int i = 0; i < (kSlabs + kSlabStep - 1) / kSlabStep; i++) {
        const int s = i * kSlabStep + s0;
        if (kSlabStep > 1 && s >= kSlabs) break;
        const bool there = s * 8 + 8 <= kChunks || s * 8 + c < kChunks;
        const u16* const from = there ? source + s * 64 : p.key_cache;
        const u32 bytes = live && there ? 16u : 0u;
        if (kKeysLeave) copy_async_16(destination + s * 128, from, bytes, policy);
        else copy_async_16(destination + s * 128, from, bytes);
      }
      if (c == 0 && s0 == 0) store_f32(shared + kMaskOffset + (stage * KV_TILE + row) * 4, live ? 0.f : kMasked);
    }
    // The copies arrive by themselves; who stored a mask word arrives once more for it.
    barrier_arrive_after_copies(full + 8 * stage);
    if (c == 0 && s0 == 0) barrier_arrive(full + 8 * stage);
    tile++;
    left--;
  }
  // One warp asks for the slice's first keys, as far as its first 32 pages go, while the kernels before this one still run; a lane for each
  // run of rows that follow each other.
  __device__ __forceinline__ void prefetch_keys() const {
    const int run = min(1 << p.block_shift, KV_TILE), begin = tile * KV_TILE, position = begin + lane * run, entry = position >> p.block_shift;
    const int end = min(min(tile_end, tile + left) * KV_TILE, min(begin + kEarlyRows, item.kv_end)), page = __shfl_sync(~0u, pages, entry & 31);
    if (p.row_stride == HEAD_SIZE && position < end && position + run > first_position && entry >> 5 == chunk && page_is_mapped(page, p.num_blocks))
      prefetch_bytes(p.key_cache + (i64)page * p.page_stride + (i64)(position & ((1 << p.block_shift) - 1)) * HEAD_SIZE, min(run, end - position) * HEAD_SIZE * 2);
  }
  __device__ __forceinline__ void load_query(const Item& i, u32 barrier) {
    copy_query<kLoaders>(p, shared, i, row_tile, thread);
    barrier_arrive_after_copies(barrier);
    if (thread == 0) barrier_arrive(barrier);
  }
};

// The life of a loading warp, except for the first query. With kQueryAhead the computing warps hold a query in registers
// once its first stages have come round, and the next one is asked for early.
template <bool kQueryAhead>
__device__ __forceinline__ void produce(Loader& loader, u32 empty, u32 query_full, u32 query_empty) {
  int stage = 0, phase = 1, query_phase = 0, since_item = 0;
  bool query_asked = false;
#pragma unroll 1
  while (loader.left > 0) {
    if (loader.at_item_end()) {
      loader.next_item();
      since_item = 0;
      if (!query_asked) {
        barrier_wait(query_empty, query_phase);
        query_phase ^= 1;
        loader.load_query(loader.item, query_full);
      }
      query_asked = false;
    }
    barrier_wait(empty + 8 * stage, phase);
    loader.issue(stage);
    if (kQueryAhead && !query_asked && since_item++ >= STAGES && loader.next_is_ahead) {
      barrier_wait(query_empty, query_phase);
      query_phase ^= 1;
      loader.load_query(loader.next, query_full);
      query_asked = true;
    }
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  copy_async_wait_all();
}
