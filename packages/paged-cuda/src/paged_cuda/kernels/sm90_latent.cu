// Split-KV attention over a paged LATENT cache on wgmma and bulk tensor copies (sm_90a).
//
// One CTA works through one slice of the schedule with one tile of 64 packed query rows. A run of KV tiles of one item is a
// fragment; it ends in output rows or in one partial. Four warpgroups, three roles (kDual, below, divides them otherwise):
//   scores   (warpgroup 0)     S = Q K^T and softmax; weights P go to shared memory. HELD_SLABS of the query's 64-channel slabs stay in
//                              registers as A fragments, the others in shared memory. S is double-buffered: kAhead slabs of the next
//                              tile's scores are issued before a tile's softmax, the others behind it and before its weights are handed
//                              over. Issuing wgmma blocks a warp until the tensor cores take it, and the outputs' wider ones go first: pieces
//                              of the softmax between the slabs would wait with those.
//   outputs  (warpgroups 1, 2) O += P V, half of the columns each; V is the very tile that was K, read transposed
//   loading  (warp 12)         walks the slice, issues all copies; where a page fills only part of a tile, each slab of each page is a
//                              copy of its own, and warp 13 walks along and issues half of them. Warp 14 keeps it level with other
//                              blocks (sm90/pace.cuh), warp 15 asks for the first keys ahead of time
// With scores on one warpgroup and O on two there is no exchange of P or of maxima between warpgroups, and Q can leave shared
// memory, which pays for a deep ring of small tiles.
//
// Where O has 128 columns and the query at most four slabs (kDual), warpgroups 0 and 1 compute scores and warpgroup 2 holds O twice:
// each of the two takes every other tile, with a maximum and a sum of its own (a stream), and the outputs join the two where a fragment ends. All
// of a tile's scores are issued before its softmax, which runs under the other stream's products. The two issue in turn, by named
// barriers: left alone they fall into step, and then the tensor cores wait for both softmaxes.
//
// Barriers (mbarriers, but for the turns of two streams; nothing joins the whole CTA after the start):
//   full[s]           bytes of stage s landed: 1 arrival + bytes        scores, outputs wait. Where warp 13 loads too it arrives as well,
//                     even if it has no bytes for the stage: none may be used up before both saw it empty, as a later look would
//                     find the phase after that and wait for one that never comes
//   empty[s]          stage s may be overwritten: 8 arrivals            loading waits. KV tile: one of each output warp once its products
//                     are complete, which implies that the scores are. Query tile: two of each score warp. kDual: two and one.
//   weights_full[b]   P buffer b written: 4 arrivals, one a score warp  outputs wait
//   weights_empty[b]  P buffer b read: an arrival of each output warp   scores wait. kDual: stream b has buffer b.
//   asked, granted    leave to load further tiles: 1 arrival            warp 14, loading wait
// Fences between the proxies:
//   P, zeroed rows of a stage and kept query slabs are generic stores that wgmma reads: each storing thread fences, then arrives or
//   meets the named barrier before anyone issues the wgmma. Stores to a stage precede the fences and arrivals through which
//   the loading warp learns that it may overwrite it. Landed bytes are read after the wait on full, in each role.
// The fragment's record travels in shared memory, written before the arrival on its first query stage. A fragment takes at least two
// stages, so with kFragments records none is overwritten before the outputs of its fragment are stored.
//
// Rows of the cache that the item must not see are never multiplied: unmapped pages arrive as zeros, and rows of a tile before
// or behind the item's keys are zeroed once landed, as 0 * NaN is NaN. Both are masked in S.
// The maximum follows a row only when it grew by more than 2^kLazy, so O is seldom rescaled.
// Weights are rounded to 16 bits for the product with V; an item of at most `slow_tiles` tiles adds what rounding left over as a
// second term. The outputs are the slower role then, and no tile's scores are computed beside the softmax of the one before, unless by
// another warpgroup. All sums have a fixed order: results repeat bit for bit.
//
// Macros: BF16 HEAD_SIZE V_HEAD_SIZE KV_TILE STAGES HELD_SLABS SHARED_BYTES, and SCORE_REGISTERS OUTPUT_REGISTERS
// LOADING_REGISTERS a thread
#include "layout/output.cuh"
#include "layout/paired_partial.cuh"
#include "layout/schedule.cuh"
#include "layout/tensor_maps.cuh"
#include "math/partial.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base2.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/dependency.cuh"
#include "ptx/matrix.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/shared.cuh"
#include "ptx/store_matrix.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/pace.cuh"

constexpr int kRows = 64, kThreads = 512;
constexpr int kQuerySlabs = (HEAD_SIZE + 63) / 64, kHeld = HELD_SLABS, kKept = kQuerySlabs - kHeld;
constexpr int kSlabs = kQuerySlabs > kVPadded / 64 ? kQuerySlabs : kVPadded / 64;
constexpr int kSlabBytes = KV_TILE * 128, kStageBytes = kSlabs * kSlabBytes;
constexpr int kQueryStages = kRows / KV_TILE;           // stages that carry a query tile
constexpr int kScores = KV_TILE / 2;                    // of a thread: two rows
constexpr bool kDual = kVPadded == 128 && kQuerySlabs <= 4;   // two warpgroups of scores, one of outputs
constexpr int kColumns = kVPadded / 2;                  // of an output warpgroup, or of each half of the only one
constexpr int kAhead = kQuerySlabs >= 6 ? 2 : 1;        // slabs of the next tile's scores that are issued before this tile's are complete
constexpr int kFragments = 8;
constexpr int kEarlyRows = 64;                          // of keys that a slice asks for before it may load them
// What is measured to pay: keys leave the L2 cache first where one row tile reads them, but not with 512 columns; outputs stay there where
// they are few, of one row tile, and behind few keys.
constexpr bool kKeysLeave = kVPadded < 512;
constexpr int kStayingTiles = 4096 / KV_TILE, kStayingRows = (1 << 24) / (2 * kVPadded);
constexpr int kScoreThreads = 128, kScoreWarps = 4, kOutputWarps = kDual ? 4 : 8;
constexpr int kReleases = 8;                            // arrivals that free a stage
constexpr float kLazy = 8.f;

constexpr int kWeightBytes = KV_TILE == 32 ? 8192 : 16384;   // both buffers; two of 32 columns share one 128-byte row
constexpr int kKeptOffset = STAGES * kStageBytes;
constexpr int kWeightOffset = kKeptOffset + kKept * kRows * 128;
constexpr int kRemainderOffset = kWeightOffset + kWeightBytes;
constexpr int kRescaleOffset = kRemainderOffset + kWeightBytes;
constexpr int kInverseOffset = kRescaleOffset + 2 * kRows * 4;
constexpr int kTopOffset = kInverseOffset + 2 * kRows * 4;   // a stream's maxima
constexpr int kGrewOffset = kTopOffset + (kDual ? 2 * kRows * 4 : 0);
constexpr int kFragmentOffset = kGrewOffset + 2 * kScoreWarps * 4;
constexpr int kFragmentBytes = 64;
constexpr int kBarrierOffset = kFragmentOffset + kFragments * kFragmentBytes;
constexpr int kMappedOffset = kBarrierOffset + 8 * (2 * STAGES + 6);
constexpr int kStartCount = 2, kStartAll = 3, kStartTiles = 10;   // words of a SliceStart: item, offset, count, all, the item from 4 on
constexpr int kStartOffset = kMappedOffset + 4 * STAGES;
constexpr int kSharedBytes = kStartOffset + 64;

static_assert(kSharedBytes == SHARED_BYTES, "the host asks for what the kernel lays out");
static_assert(KV_TILE == 32 || KV_TILE == 64, "tiles that the wrappers know");
static_assert(!kDual || (KV_TILE == 64 && kKept == 0), "a buffer of weights for each stream, the whole query in registers");
static_assert(kHeld >= 1 && kKept >= 0 && kQuerySlabs <= 9 && kVPadded <= 512, "registers");
static_assert(!kDual || STAGES % 2 == 0, "of items of one tile the second stream waits for the query alone, every other stage");
static_assert(STAGES > kQueryStages, "a query and a key tile");
static_assert(2 * kFragments > STAGES + 2, "records outlive the outputs of their fragment");

// A number that all lanes of a warp have, told to the compiler: descriptors that follow from it then stay in uniform registers.
__device__ __forceinline__ int same_in_warp(int x) { return __shfl_sync(~0u, x, 0); }
__device__ __forceinline__ bool likely(bool x) { return __builtin_expect(x, true); }

constexpr int steps_of(int slab) { return slab * 64 + 64 <= HEAD_SIZE ? 4 : (HEAD_SIZE - slab * 64 + 15) / 16; }

// A run of KV tiles of one item, as the loading warp describes it to the others: words of the record.
enum Word : int {
  kRow0 = 1,       // first packed row of the tile, counted over the call
  kLiveRows = 2,   // of the item from there on
  kPast = 3,       // cached length
  kFirst = 4,      // first packed row of the tile, counted from the request's first token
  kKvEnd = 5,      // no row sees this position or a later one
  kItemTiles = 6,  // KV tiles of the whole item
  kPosition = 8,   // of the first KV row, a multiple of KV_TILE
  kTiles = 9,
  kSlot = 10,      // of the partial; -1: whole, the output itself
  kLast = 11,      // whether the slice ends here
};

struct Shared {
  u32 base;
  __device__ __forceinline__ u32 stage(int s) const { return base + s * kStageBytes; }
  __device__ __forceinline__ u32 full(int s) const { return base + kBarrierOffset + 8 * s; }
  __device__ __forceinline__ u32 empty(int s) const { return base + kBarrierOffset + 8 * (STAGES + s); }
  __device__ __forceinline__ u32 weights_full(int b) const { return base + kBarrierOffset + 8 * (2 * STAGES + b); }
  __device__ __forceinline__ u32 weights_empty(int b) const { return base + kBarrierOffset + 8 * (2 * STAGES + 2 + b); }
  __device__ __forceinline__ u32 asked() const { return base + kBarrierOffset + 8 * (2 * STAGES + 4); }
  __device__ __forceinline__ u32 granted() const { return base + kBarrierOffset + 8 * (2 * STAGES + 5); }
  __device__ __forceinline__ int start(int word) const { return load_s32(base + kStartOffset + 4 * word); }
  __device__ __forceinline__ u32 mapped(int s) const { return base + kMappedOffset + 4 * s; }
  __device__ __forceinline__ u32 fragment(int f) const { return base + kFragmentOffset + f % kFragments * kFragmentBytes; }
  __device__ __forceinline__ static int word(u32 fragment, Word w) { return load_s32(fragment + 4 * w); }
};

// Position in the ring and its phase.
struct Ring {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  __device__ __forceinline__ int before() const { return stage == 0 ? STAGES - 1 : stage - 1; }
};
// The two buffers of weights.
struct Buffers {
  int buffer = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (kDual) { phase ^= 1; return; }   // one for each warpgroup of scores
    buffer ^= 1;
    phase ^= buffer == 0;
  }
};

// ---------------------------------------------------------------------------------------------------------------- loading

// The lane, read anew: what is derived from it is then computed where it is used and holds no register of the loading warp's few.
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Walks the slice with few registers: an item's record lies one word a lane, as do 32 entries of its block table.
struct Walk {
  const AttentionParams& p;
  int index, left, tile, tile_end;
  int words, next_words;     // of this item and the next
  int pages, pages_ahead;    // the current entries, and those of the next chunk or of the next item

  __device__ Walk(const AttentionParams& params, int start_word) : p(params) {
    index = __shfl_sync(~0u, start_word, 0);
    left = __shfl_sync(~0u, start_word, kStartCount);
    words = __shfl_sync(~0u, start_word, (lane_now() & 7) + 4);
    enter(__shfl_sync(~0u, start_word, 1));
    pages = entries(words, chunk_of(tile));
  }
  __device__ __forceinline__ static int field(int words, int k) { return __shfl_sync(~0u, words, k); }
  __device__ __forceinline__ int row0() const { return field(words, 1); }
  __device__ __forceinline__ int kv_end() const { return field(words, 5); }
  __device__ __forceinline__ int tiles() const { return field(words, 6); }
  __device__ __forceinline__ int part() const { return field(words, 7); }

  __device__ __forceinline__ int tile_first_of(int item_words) const {
    if (p.local_window_size <= 0) return 0;
    return visible_begin(field(item_words, 3) + (u32)field(item_words, 4) / (u32)p.num_heads, p.local_window_size) / KV_TILE;
  }
  __device__ __forceinline__ int chunk_of(int t) const { return (t * KV_TILE >> p.block_shift) >> 5; }
  __device__ __forceinline__ int entries(int item_words, int chunk) const {
    const int e = chunk * 32 + lane_now(), sequence = field(item_words, 0), end = field(item_words, 5);
    return e < p.max_blocks && ((i64)e << p.block_shift) < end ? p.block_table[sequence * p.table_stride + e] : -1;
  }
  __device__ __forceinline__ void enter(int offset) {
    const int tile_first = tile_first_of(words);
    tile = tile_first + offset;
    tile_end = tile_first + tiles();
    next_words = left > tile_end - tile ? ((const i32*)(p.items + index + 1))[lane_now() & 7] : 0;
  }
  // Reads under load cost microseconds: called once the first tile of a chunk is on its way, for the entries after this chunk.
  __device__ __forceinline__ void look_ahead() {
    const int chunk = chunk_of(tile) + 1;
    if (((i64)chunk * 32 << p.block_shift) < kv_end()) pages_ahead = entries(words, chunk);
    else if (left > tile_end - tile) pages_ahead = entries(next_words, chunk_of(tile_first_of(next_words)));
  }
  __device__ __forceinline__ void next_item() {
    words = next_words;
    index++;
    enter(0);
    pages = pages_ahead;
  }
  // Page of the position `offset` rows into the current tile, -1 where there is none.
  __device__ __forceinline__ int page_at(int offset) const {
    const int page = __shfl_sync(~0u, pages, ((tile * KV_TILE + offset) >> p.block_shift) & 31);
    return (u32)page < (u32)p.num_blocks ? page : -1;
  }
};

// Writes the record of the fragment that starts at the current tile.
__device__ __forceinline__ void describe(const Walk& walk, u32 record, int tiles, bool first_fragment) {
  const AttentionParams& p = walk.p;
  const int tile_first = walk.tile_end - walk.tiles(), part = walk.part();
  const bool whole = walk.tile == tile_first && walk.tile + tiles == walk.tile_end;
  int slot = -1;
  if (!whole) slot = p.chunk ? part + walk.tile / p.chunk - tile_first / p.chunk : 2 * (int)blockIdx.y + (first_fragment ? 0 : 1);
  const int tile_row = blockIdx.x * kRows, k = lane_now();
  int word = walk.words;
  if (k == kRow0 || k == kFirst) word += tile_row;
  if (k == kLiveRows) word -= tile_row;
  if (k == kPosition) word = walk.tile * KV_TILE;
  if (k == kTiles) word = tiles;
  if (k == kSlot) word = slot;
  if (k == kLast) word = tiles == walk.left;
  if (k <= kLast) store_s32(record + 4 * k, word);
  __syncwarp();
}

// The query goes through the ring in front of its keys: prefetched in order, never behind a full ring of keys. Slabs before and
// behind the rotated ones come from the query, those from the rows that append rotated.
__device__ __forceinline__ void load_query(const Walk& walk, const TensorMaps& maps, u32 stage, u32 full, int first_row) {
  const u32 row0 = walk.row0() + blockIdx.x * kRows + first_row;
  if (likely(!maps.single_slabs)) {
    const u32 token = row0 < (u32)maps.query_rows ? 0 : row0 / (u32)maps.query_rows, y = row0 - token * maps.query_rows;
    const int lane = lane_now();
    if (lane == 0 && maps.rotary_slabs < kQuerySlabs) copy_box(stage, maps.query, full, 0, y, 0, token);
    if (lane == 1 && maps.rotary_slabs > 0) copy_box(stage + maps.rotary_slab * kSlabBytes, maps.query_rotary, full, 0, y, 0, token);
    return;
  }
#pragma unroll 1
  for (int k = lane_now(); k < kQuerySlabs * (KV_TILE / maps.query_box); k += 32) {
    const int slab = k % kQuerySlabs, row = k / kQuerySlabs * maps.query_box, rotary = slab - maps.rotary_slab;
    const u32 token = (row0 + row) / (u32)maps.query_rows, y = row0 + row - token * maps.query_rows;
    const bool rotated = (u32)rotary < (u32)maps.rotary_slabs;
    copy_box(stage + slab * kSlabBytes + row * 128, rotated ? maps.query_rotary : maps.query, full, (rotated ? rotary : slab) * 64, y, 0, token);
  }
}

// One warp asks for the slice's first keys, as far as its first 32 pages go, while the kernels before this one still run; a lane for each
// run of rows that follow each other.
__device__ __forceinline__ void prefetch_keys(const AttentionParams& p, int start_word) {
  const Walk walk(p, start_word);
  const int run = min(1 << p.block_shift, KV_TILE), begin = walk.tile * KV_TILE, position = begin + lane_now() * run, entry = position >> p.block_shift;
  const int end = min(min(walk.tile_end, walk.tile + walk.left) * KV_TILE, min(begin + kEarlyRows, walk.kv_end())), page = __shfl_sync(~0u, walk.pages, entry & 31);
  if (p.row_stride == HEAD_SIZE && position < end && entry >> 5 == walk.chunk_of(walk.tile) && (u32)page < (u32)p.num_blocks)
    prefetch_bytes(p.key_cache + (i64)page * p.page_stride + (i64)(position & ((1 << p.block_shift) - 1)) * HEAD_SIZE, min(run, end - position) * HEAD_SIZE * 2);
}

// kLead: the warp that says what arrives where; the other one only issues its half of the copies.
template <bool kLead>
__device__ __forceinline__ void load(const AttentionParams& p, const TensorMaps& maps, const Shared& shared, int start_word) {
  Walk walk(p, start_word);
  const bool paced = one_tile_reads(p, kRows);
  const u64 policy = leaving_first();
  wait_for_previous_kernels();
  Ring ring;
  ring.phase = 1;
#pragma unroll 1
  for (int fragment = 0; walk.left > 0; fragment++) {
    int stop = min(walk.tile_end, walk.tile + walk.left);
    if (p.chunk) stop = min(stop, walk.tile - walk.tile % p.chunk + p.chunk);
#pragma unroll 1
    for (int q = 0; q < kQueryStages; q++) {
      barrier_wait(shared.empty(ring.stage), ring.phase);
      if (!kLead) {
        __syncwarp();
        if (lane_now() == 0) barrier_arrive(shared.full(ring.stage));
      } else {
        if (q == 0) describe(walk, shared.fragment(fragment), stop - walk.tile, fragment == 0);
        if (lane_now() == 0) barrier_arrive_expecting(shared.full(ring.stage), kQuerySlabs * kSlabBytes);
        __syncwarp();
        load_query(walk, maps, shared.stage(ring.stage), shared.full(ring.stage), q * KV_TILE);
      }
      ring.advance();
    }
    bool new_chunk = true;
#pragma unroll 1
    while (walk.tile < stop) {
      const int lane = lane_now(), box = min(1 << p.block_shift, KV_TILE), slabs = maps.cache_slabs;
      const int half = box < KV_TILE ? KV_TILE / 2 : 0;   // what the lead leaves to the other
      const int row = (kLead ? 0 : half) + (slabs == 1 ? lane / kSlabs * box : lane * box), page = walk.page_at(row);
      const u32 mapped = kLead ? __ballot_sync(~0u, walk.page_at(lane * 16 % KV_TILE) >= 0) & ((1u << KV_TILE / 16) - 1) : 0;
      barrier_wait(shared.empty(ring.stage), ring.phase);
      if (kLead && lane == 0) {
        store_s32(shared.mapped(ring.stage), mapped);
        barrier_arrive_expecting(shared.full(ring.stage), kStageBytes);
      }
      if (!kLead && lane == 0) barrier_arrive(shared.full(ring.stage));
      __syncwarp();
      if (row < (kLead && half ? half : KV_TILE)) {
        const int slab = slabs == 1 ? lane % kSlabs : 0;
        const u32 to = shared.stage(ring.stage) + slab * kSlabBytes + row * 128;
        const int y = (walk.tile * KV_TILE + row) & ((1 << p.block_shift) - 1);
        if (kKeysLeave && paced) copy_box(to, maps.key_cache, shared.full(ring.stage), slab * 64, y, 0, page, policy);
        else copy_box(to, maps.key_cache, shared.full(ring.stage), slab * 64, y, 0, page);
      }
      ring.advance();
      if (new_chunk) walk.look_ahead();
      walk.left--;
      walk.tile++;
      if (kLead && paced) ask_leave(shared.start(kStartCount), walk.left, shared.asked(), shared.granted(), lane_now() == 0);
      new_chunk = walk.chunk_of(walk.tile) != walk.chunk_of(walk.tile - 1);
      if (new_chunk && walk.tile < walk.tile_end) walk.pages = walk.pages_ahead;
    }
    if (walk.left > 0 && walk.tile == walk.tile_end) walk.next_item();
  }
}

// ----------------------------------------------------------------------------------------------------------------- scores

__device__ __forceinline__ void meet_score_warps(int stream = 0) { asm volatile("bar.sync %0, %1;" ::"r"(1 + stream), "n"(kScoreThreads) : "memory"); }

// A loop whose index is a constant expression in every round.
template <int kValue>
struct Constant { static constexpr int value = kValue; };
template <int kBegin, int kEnd, class Body>
__device__ __forceinline__ void unrolled(const Body& body) {
  if constexpr (kBegin < kEnd) {
    body(Constant<kBegin>{});
    unrolled<kBegin + 1, kEnd>(body);
  }
}

// The same value, of which the compiler forgets where it is from: what follows from it is computed anew, beside the products that need it.
// The descriptors of all kept steps, computed before a loop, would fill the uniform registers and some of each thread's, and a move from
// these to those would come before many a product.
__device__ __forceinline__ u64 anew(u64 x) {
  asm volatile("" : "+l"(x));
  return x;
}

// One slab of S = Q K^T. Slabs in registers come first: k = 0 starts the sum.
template <int k>
__device__ __forceinline__ void multiply_slab(float* s, const u32* query, u64 kept, u64 keys) {
  constexpr int slab = k < kHeld ? kKept + k : k - kHeld;
  unrolled<0, steps_of(slab)>([&](auto step) {
    constexpr int j = decltype(step)::value;
    const u64 b = keys + slab * (kSlabBytes >> 4) + j * 2;
    if constexpr (k == 0 && j == 0) start_scores(s, query, b);
    else if constexpr (k < kHeld) add_scores(s, query + 16 * k + 4 * j, b);
    else add_scores_shared(s, advance_descriptor(kept, slab * (kRows * 128 >> 4) + j * 2), b);
  });
}

// The log-sum-exp (base 2; kStartMax: no key) of rows `row` and `row` + 8, for the combine kernel or the caller.
__device__ __forceinline__ void store_log_sums(const AttentionParams& p, u32 fragment, int row, float lse0, float lse1) {
  const int row0 = Shared::word(fragment, kRow0), rows = Shared::word(fragment, kLiveRows), slot = Shared::word(fragment, kSlot);
  if (slot >= 0) {
    const u32 at = ((u32)slot * p.row_tiles + blockIdx.x) * kRows + row;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (row < rows) *partial_facts(p, at, half) = lse0;
      if (row + 8 < rows) *partial_facts(p, at + 8, half) = lse1;
    }
  } else if (p.lse) {
    float* const to = p.lse + (i64)row0 + row;
    if (row < rows) to[0] = lse0 > kStartMax ? lse0 * kLn2 : kMinusInfinity;
    if (row + 8 < rows) to[8] = lse1 > kStartMax ? lse1 * kLn2 : kMinusInfinity;
  }
}

struct Scorer {
  const AttentionParams& p;
  const Shared shared;
  const int thread, lane, warp, row;      // the first of the thread's two rows, eight apart
  // Logits in base 2 are score * factor. Where that keeps their order and kStartMax * factor is far from the end of the range, the factor
  // is applied with the exponential and `slope` is the factor; else it is applied first and the slope is 1.
  const float factor, slope;
  Ring ring;
  Buffers buffers;
  float top0, top1, sum0, sum1, rescale0, rescale1;   // the maximum followed, this thread's share of the sum
  u32 weights[kScores / 2];                           // A fragments
  int position;                                       // of the tile that the softmax is at
  int kv_begin, kv_end, clean_begin, clean_end;       // keys of the item (of a window, they begin in its first tile); keys that every row sees
  u32 mapped;                                         // its 16-row groups whose pages exist
  bool grew;
  bool turn;                                          // whether this of two warpgroups of scores is the next to multiply

  // A stream has the buffer of its number.
  __device__ __forceinline__ void take_turn() {
    if (!turn) asm volatile("bar.sync %0, %1;" ::"r"(3 + buffers.buffer), "n"(2 * kScoreThreads) : "memory");
  }
  __device__ __forceinline__ void give_turn() {
    asm volatile("bar.arrive %0, %1;" ::"r"(4 - buffers.buffer), "n"(2 * kScoreThreads) : "memory");
  }

  __device__ __forceinline__ void enter(u32 fragment) {
    position = Shared::word(fragment, kPosition);
    kv_end = Shared::word(fragment, kKvEnd);
    // The tile's last row, its first one and the item's first one, a lane each: a division takes long.
    const int first = Shared::word(fragment, kFirst), last = first + min(Shared::word(fragment, kLiveRows), kRows) - 1;
    const int at = Shared::word(fragment, kPast) + (u32)(lane == 0 ? last : lane == 1 ? first : first - (int)blockIdx.x * kRows) / (u32)p.num_heads;
    clean_begin = visible_begin(__shfl_sync(~0u, at, 0), p.local_window_size);
    clean_end = p.causal ? min(__shfl_sync(~0u, at, 1) + 1, kv_end) : kv_end;
    kv_begin = visible_begin(__shfl_sync(~0u, at, 2), p.local_window_size);
    top0 = top1 = kStartMax;
    sum0 = sum1 = 0.f;
  }

  // Waits for a tile of keys and zeroes the rows of it that the item must not see.
  __device__ __forceinline__ void acquire_keys(int first_seen, int tile_position) {
    barrier_wait(shared.full(ring.stage), ring.phase);
    if (likely(tile_position >= first_seen && tile_position + KV_TILE <= kv_end)) return;
    const int dead_before = max(first_seen - tile_position, 0), first_behind = max(min(kv_end - tile_position, KV_TILE), dead_before);
    const int dead = dead_before + KV_TILE - first_behind;
#pragma unroll 1
    for (int k = thread; k < dead * kSlabs * 8; k += kScoreThreads) {
      const int d = k / (kSlabs * 8), word = k - d * (kSlabs * 8), r = d < dead_before ? d : d - dead_before + first_behind;
      store_s32x4(shared.stage(ring.stage) + (word >> 3) * kSlabBytes + r * 128 + (word & 7) * 16, 0, 0, 0, 0);
    }
    publish_to_async_proxy();
    meet_score_warps(kDual ? buffers.buffer : 0);
  }

  // Reads which pages of the tile in the ring exist; where products are under way, as the value is waited for.
  __device__ __forceinline__ void look_at_pages() { mapped = load_s32(shared.mapped(ring.stage)); }

  // Turns scores into what the exponential takes, masked.
  __device__ __forceinline__ void finish_scores(float* s, u32 fragment) {
    const bool clean = position >= clean_begin && position + KV_TILE <= clean_end && mapped == (1u << KV_TILE / 16) - 1;
    if (likely(clean && slope != 1.f)) return;
    if (slope == 1.f) {
      if (p.softcap > 0.f) {
#pragma unroll
        for (int j = 0; j < kScores; j++) s[j] = p.softcap * kLog2E * (1.f - 2.f * reciprocal_fast(exp2_fast(s[j] * factor) + 1.f));   // tanh
      } else {
#pragma unroll
        for (int j = 0; j < kScores; j++) s[j] *= factor;
      }
    }
    if (clean) return;
    const int past = Shared::word(fragment, kPast), first = Shared::word(fragment, kFirst) + row;
    const int at0 = past + (u32)first / (u32)p.num_heads, at1 = past + (u32)(first + 8) / (u32)p.num_heads;
    const int from0 = visible_begin(at0, p.local_window_size) - position, from1 = visible_begin(at1, p.local_window_size) - position;
    const int to0 = (p.causal ? min(at0 + 1, kv_end) : kv_end) - position, to1 = (p.causal ? min(at1 + 1, kv_end) : kv_end) - position;
#pragma unroll
    for (int j = 0; j < kScores; j++) {
      const int column = (j >> 2) * 8 + (lane & 3) * 2 + (j & 1);
      const bool seen = column >= (j & 2 ? from1 : from0) && column < (j & 2 ? to1 : to0) && (mapped >> (j >> 3) & 1);
      if (!seen) s[j] = kMasked;
    }
  }
  __device__ __forceinline__ void follow_maximum(const float* s) {
    float new0 = fmaxf(s[0], s[1]), new1 = fmaxf(s[2], s[3]);
#pragma unroll
    for (int j = 4; j < kScores; j += 4) {
      new0 = fmaxf(new0, fmaxf(s[j], s[j + 1]));
      new1 = fmaxf(new1, fmaxf(s[j + 2], s[j + 3]));
    }
    new0 = fmaxf(new0, __shfl_xor_sync(~0u, new0, 1));
    new1 = fmaxf(new1, __shfl_xor_sync(~0u, new1, 1));
    new0 = fmaxf(new0, __shfl_xor_sync(~0u, new0, 2));
    new1 = fmaxf(new1, __shfl_xor_sync(~0u, new1, 2));
    const bool grew0 = (new0 - top0) * slope > kLazy, grew1 = (new1 - top1) * slope > kLazy;
    grew = __any_sync(~0u, grew0 || grew1);
    new0 = grew0 ? new0 : top0;
    new1 = grew1 ? new1 : top1;
    rescale0 = exp2_fast((top0 - new0) * slope);
    rescale1 = exp2_fast((top1 - new1) * slope);
    top0 = new0;
    top1 = new1;
    sum0 *= rescale0;
    sum1 *= rescale1;
  }
  // Weights of n8 column block `block`. `s` keeps them in float32.
  __device__ __forceinline__ void weigh(float* s, int block) {
    const float low0 = -top0 * slope, low1 = -top1 * slope;
    float* const w = s + 4 * block;
    w[0] = exp2_fast(fmaf(w[0], slope, low0));
    w[1] = exp2_fast(fmaf(w[1], slope, low0));
    w[2] = exp2_fast(fmaf(w[2], slope, low1));
    w[3] = exp2_fast(fmaf(w[3], slope, low1));
    sum0 += w[0] + w[1];
    sum1 += w[2] + w[3];
    weights[2 * block] = pack_pair(w[0], w[1]);
    weights[2 * block + 1] = pack_pair(w[2], w[3]);
  }
  __device__ __forceinline__ void store_weights(int term) {
#pragma unroll
    for (int k = 0; k < KV_TILE / 16; k++) {
      const u32 chunk = (KV_TILE == 32 ? buffers.buffer * 4 : 0) + k * 2 + (lane >> 4);
      const u32 at = shared.base + kWeightOffset + term * kWeightBytes + (KV_TILE == 64 ? buffers.buffer * 8192 : 0) +
                     (warp * 16 + (lane >> 3 & 1) * 8 + (lane & 7)) * 128 + ((chunk ^ (lane & 7)) << 4);
      store_matrix_x4(at, weights + 4 * k);
    }
  }
  // What rounding the weights left over.
  __device__ __forceinline__ void take_remainder(const float* s) {
#pragma unroll
    for (int k = 0; k < kScores / 2; k++) {
      const float2 w = unpack_pair(weights[k]);
      weights[k] = pack_pair(s[2 * k] - w.x, s[2 * k + 1] - w.y);
    }
  }
  __device__ __forceinline__ void await_buffer() { barrier_wait(shared.weights_empty(buffers.buffer), buffers.phase ^ 1); }
  __device__ __forceinline__ void store_rescale(bool first) {
    if (grew && (lane & 3) == 0) {
      const u32 at = shared.base + kRescaleOffset + (buffers.buffer * kRows + row) * 4;
      store_f32(at, rescale0);
      store_f32(at + 32, rescale1);
    }
    if (lane == 0) store_s32(shared.base + kGrewOffset + (buffers.buffer * kScoreWarps + warp) * 4, grew && !first);
  }
  __device__ __forceinline__ void hand_over() {
    publish_to_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.weights_full(buffers.buffer));
    buffers.advance();
    position += kDual ? 2 * KV_TILE : KV_TILE;
  }
  // The rows' sums: 1 / sum for the outputs, the log-sum-exp for the caller or the combine kernel. Of a stream the outputs get sum and
  // maximum, as they join it with the other.
  __device__ __forceinline__ void finish_rows(u32 fragment) {
    sum0 += __shfl_xor_sync(~0u, sum0, 1);
    sum1 += __shfl_xor_sync(~0u, sum1, 1);
    sum0 += __shfl_xor_sync(~0u, sum0, 2);
    sum1 += __shfl_xor_sync(~0u, sum1, 2);
    if (lane & 3) return;
    const u32 at = shared.base + kInverseOffset + (buffers.buffer * kRows + row) * 4;
    if (kDual) {
      store_f32(at, sum0);
      store_f32(at + 32, sum1);
      store_f32(at + kTopOffset - kInverseOffset, fmaxf(top0 * slope, kStartMax));   // where nothing was seen, no infinity
      store_f32(at + kTopOffset - kInverseOffset + 32, fmaxf(top1 * slope, kStartMax));
      return;
    }
    store_f32(at, sum0 > 0.f ? 1.f / sum0 : 0.f);
    store_f32(at + 32, sum1 > 0.f ? 1.f / sum1 : 0.f);
    store_log_sums(p, fragment, row, sum0 > 0.f ? top0 * slope + log2_fast(sum0) : kStartMax, sum1 > 0.f ? top1 * slope + log2_fast(sum1) : kStartMax);
  }

  // Takes the query out of the ring: slabs from kKept on as A fragments, those before them into their own place.
  __device__ __forceinline__ void take_query(u32* query) {
    Ring second = ring;
    if (kQueryStages == 2) second.advance();
    barrier_wait(shared.full(ring.stage), ring.phase);
    if (kQueryStages == 2) barrier_wait(shared.full(second.stage), second.phase);
    const u32 own = shared.stage(kQueryStages == 1 || warp < 2 ? ring.stage : second.stage);
    const u32 at = own + (warp * 16 % KV_TILE + (lane >> 3 & 1) * 8 + (lane & 7)) * 128;
#pragma unroll
    for (int k = 0; k < 4 * kHeld; k++)
      if (k % 4 < steps_of(kKept + k / 4)) load_matrix_x4(query + 4 * k, at + (kKept + k / 4) * kSlabBytes + (((k % 4 * 2 + (lane >> 4)) ^ (lane & 7)) << 4));
    if (kKept > 0) {
      // Both places use one swizzle, so 16-byte words move as they are; a slab's are all read before the first is stored.
      const u32 from = shared.stage(ring.stage) + thread * 16, from_second = shared.stage(second.stage) + thread * 16;
      const u32 to = shared.base + kKeptOffset + thread * 16;
      constexpr int kStep = kScoreThreads * 16, kSteps = kRows * 128 / kStep;
#pragma unroll
      for (int slab = 0; slab < kKept; slab++) {
        int4 words[kSteps];
#pragma unroll
        for (int k = 0; k < kSteps; k++)
          words[k] = load_s32x4((k * kStep < kSlabBytes ? from : from_second) + slab * kSlabBytes + k * kStep % kSlabBytes);
#pragma unroll
        for (int k = 0; k < kSteps; k++) store_s32x4(to + slab * kRows * 128 + k * kStep, words[k].x, words[k].y, words[k].z, words[k].w);
      }
      publish_to_async_proxy();
      meet_score_warps();
    } else {
      __syncwarp();
    }
    if (lane == 0) {
      barrier_arrive_times(shared.empty(ring.stage), kDual ? 1 : 2);
      if (kQueryStages == 2) barrier_arrive_times(shared.empty(second.stage), 2);
    }
    ring = second;
    ring.advance();
  }
};

// The products of one tile's scores, all slabs.
__device__ __forceinline__ void multiply_tile(float* s, const Scorer& x, const u32* query, u64 kept, u64 keys_base) {
  const u64 keys = keys_base + (u64)(x.ring.stage * (kStageBytes >> 4));
  warpgroup_fence();
  const u64 kept_now = anew(kept);
  unrolled<0, kQuerySlabs>([&](auto k) { multiply_slab<decltype(k)::value>(s, query, kept_now, keys); });
  warpgroup_commit();
}

// The softmax of a tile whose scores are the last that the warpgroup has issued.
template <int kTerms>
__device__ __forceinline__ void finish_tile(Scorer& x, float* s, u32 fragment, bool first, bool last) {
  warpgroup_wait<0>();
  x.finish_scores(s, fragment);
  x.follow_maximum(s);
#pragma unroll
  for (int block = 0; block < kScores / 4; block++) x.weigh(s, block);
  x.await_buffer();
  x.store_weights(0);
  if constexpr (kTerms == 2) {
    x.take_remainder(s);
    x.store_weights(1);
  }
  x.store_rescale(first);
  if (last) x.finish_rows(fragment);
  x.hand_over();
}

// The tiles of a fragment with two-term weights, one after the other: the outputs are the slower role then.
__device__ __forceinline__ void score_two_terms(Scorer& x, u32 fragment, const u32* query, u64 kept, u64 keys_base) {
  const int tiles = Shared::word(fragment, kTiles);
  float s[kScores];
#pragma unroll 1
  for (int t = 0; t < tiles; t++) {
    x.acquire_keys(t == 0 ? x.kv_begin : 0, x.position);
    multiply_tile(s, x, query, kept, keys_base);
    x.look_at_pages();
    x.ring.advance();
    finish_tile<2>(x, s, fragment, t == 0, t == tiles - 1);
  }
}

// Every other tile of a fragment, from the stream's number on: the other warpgroup of scores has those between, and a maximum and a sum of its own.
// They multiply in turn, in the order of the tiles: left alone they fall into step, and then the tensor cores wait for two softmaxes.
template <int kTerms>
__device__ __forceinline__ void score_stream(Scorer& x, u32 fragment, const u32* query, u64 kept, u64 keys_base, bool last) {
  const int stream = x.buffers.buffer, tiles = Shared::word(fragment, kTiles);
  float s[kScores];
  x.position += stream * KV_TILE;
#pragma unroll 1
  for (int t = 0; t < tiles; t++) {
    if ((t & 1) == stream) {
      x.acquire_keys(t == 0 ? x.kv_begin : 0, x.position);
      x.take_turn();
      multiply_tile(s, x, query, kept, keys_base);
      // The next tile is the other's, but after an odd number of them, as each fragment begins with stream 0.
      x.turn = t == tiles - 1 && (stream == 0 || last);
      if (!x.turn) x.give_turn();
      x.look_at_pages();
      finish_tile<kTerms>(x, s, fragment, t < 2, t + 2 >= tiles);
    }
    x.ring.advance();
  }
}

// The tiles of a fragment with one-term weights: the softmax of a tile is worked off between the first slabs of the next and the others.
__device__ __forceinline__ void score_one_term(Scorer& x, u32 fragment, const u32* query, u64 kept, u64 keys_base) {
  float even[kScores], odd[kScores];
  int left = Shared::word(fragment, kTiles);
  bool first = true;
  auto step = [&](float* next, float* current) {
    x.acquire_keys(0, x.position + KV_TILE);   // keys before the first visible one are in the first tile
    const u64 keys = keys_base + (u64)(x.ring.stage * (kStageBytes >> 4));
    warpgroup_fence();
    unrolled<0, kAhead>([&](auto k) { multiply_slab<decltype(k)::value>(next, query, kept, keys); });
    warpgroup_commit();
    warpgroup_wait<1>();
    x.finish_scores(current, fragment);
    x.follow_maximum(current);
#pragma unroll
    for (int block = 0; block < kScores / 4; block++) x.weigh(current, block);
    x.await_buffer();
    x.store_weights(0);
    x.store_rescale(first);
    x.look_at_pages();
    const u64 kept_now = anew(kept);
    unrolled<kAhead, kQuerySlabs>([&](auto k) { multiply_slab<decltype(k)::value>(next, query, kept_now, keys); });
    x.hand_over();
    warpgroup_commit();
    x.ring.advance();
    first = false;
    left--;
  };
  x.acquire_keys(x.kv_begin, x.position);
  multiply_tile(even, x, query, kept, keys_base);
  x.look_at_pages();
  x.ring.advance();
#pragma unroll 1
  for (;;) {
    if (left == 1) { finish_tile<1>(x, even, fragment, first, true); break; }
    step(odd, even);
    if (left == 1) { finish_tile<1>(x, odd, fragment, false, true); break; }
    step(even, odd);
  }
}

__device__ __forceinline__ void score(const AttentionParams& p, const Shared& shared, int block_thread) {
  const int stream = kDual ? same_in_warp(block_thread >> 7) : 0, thread = kDual ? block_thread & 127 : block_thread, lane = thread & 31, warp = thread >> 5;
  const float factor = p.softcap > 0.f ? 2.f * kLog2E * p.scale / p.softcap : p.scale * kLog2E;
  const bool ordered = !(p.softcap > 0.f) && factor > 1e-12f && factor < 1e6f;
  Scorer x{p, shared, thread, lane, warp, warp * 16 + (lane >> 2), factor, ordered ? factor : 1.f};
  if (kDual) {
    x.buffers.buffer = stream;
    x.turn = stream == 0;
  }
  wait_for_previous_kernels();
  const u64 kept = matrix_descriptor(shared.base + kKeptOffset, 16), keys_base = matrix_descriptor(shared.base, 16);
  u32 query[16 * kHeld];
  bool last = false;
#pragma unroll 1
  for (int f = 0; !last; f++) {
    const u32 fragment = shared.fragment(f);
    if (kKept > 0) meet_score_warps();   // every warp's products with the kept slabs are complete
    x.take_query(query);
    x.enter(fragment);
    last = Shared::word(fragment, kLast);
    const bool two_terms = Shared::word(fragment, kItemTiles) <= p.slow_tiles;
    if constexpr (kDual) {
      if (two_terms) score_stream<2>(x, fragment, query, kept, keys_base, last);
      else score_stream<1>(x, fragment, query, kept, keys_base, last);
    } else {
      if (two_terms) score_two_terms(x, fragment, query, kept, keys_base);
      else score_one_term(x, fragment, query, kept, keys_base);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- outputs

// O (+)= P V for one k16 step of one term.
__device__ __forceinline__ void add_products(float* out, u64 weights, u64 values, bool add) {
#pragma unroll
  for (int c = 0; c + 128 <= kColumns; c += 128) add_outputs_128(out + c / 2, weights, values + c / 64 * (kSlabBytes >> 4), add);
  if (kColumns % 128) add_outputs_64(out + kColumns / 128 * 64, weights, values + kColumns / 128 * 2 * (kSlabBytes >> 4), add);
}

// Transposes 4 x 4 words among the four lanes of a quad.
__device__ __forceinline__ void transpose_quad(u32* v, int lane) {
  const bool odd = lane & 1, high = lane & 2;
  u32 s = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), t = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  if (odd) { v[0] = s; v[2] = t; } else { v[1] = s; v[3] = t; }
  s = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
  t = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
  if (high) { v[0] = s; v[1] = t; } else { v[2] = s; v[3] = t; }
}

// One of a thread's two rows, of which the columns below V_HEAD_SIZE exist. A negative factor marks a row that is not stored; its
// lanes still take part in the exchange. What is not aligned stands apart from what is, whose code is then fetched in a row.
template <bool kVectors>
__device__ __forceinline__ void store_row(u16* row, const float* out, int first_column, int half, float inverse, int lane, u64 policy) {
  u16* const own = row + first_column + (lane & 3) * 8;
#pragma unroll
  for (int g = 0; g < kColumns / 8; g += 4) {
    u32 v[4];
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = pack_pair(out[4 * (g + e) + half * 2] * inverse, out[4 * (g + e) + half * 2 + 1] * inverse);
    if constexpr (kVectors) {
      transpose_quad(v, lane);
      if (inverse >= 0.f && (V_HEAD_SIZE == kVPadded || first_column + g * 8 + (lane & 3) * 8 < V_HEAD_SIZE))
        store_words((u32*)(own + g * 8), policy, v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int column = first_column + (g + e) * 8 + (lane & 3) * 2;
        // Volatile, which keeps their order: else all would be packed long before they are stored.
        if (inverse >= 0.f && column < V_HEAD_SIZE) *(volatile u16*)(row + column) = (u16)v[e];
        if (inverse >= 0.f && column + 1 < V_HEAD_SIZE) *(volatile u16*)(row + column + 1) = (u16)(v[e] >> 16);
      }
    }
  }
}
__device__ __forceinline__ void store_output(const AttentionParams& p, const float* out, i64 row0, int row, int rows, int first_column, float inverse0,
                                             float inverse1, bool stays) {
  const int lane = lane_now();
  const u64 policy = staying_if(stays);
  u16* const at0 = p.output + packed_row_offset((u32)(row0 + min(row, rows - 1)), p.num_heads, p.output_stride, V_HEAD_SIZE);
  u16* const at1 = p.output + packed_row_offset((u32)(row0 + min(row + 8, rows - 1)), p.num_heads, p.output_stride, V_HEAD_SIZE);
  if (row >= rows) inverse0 = -1.f;
  if (row + 8 >= rows) inverse1 = -1.f;
  if (likely(V_HEAD_SIZE % 8 == 0 && p.output_stride % 8 == 0 && (u64)p.output % 16 == 0)) {
    store_row<true>(at0, out, first_column, 0, inverse0, lane, policy);
    store_row<true>(at1, out, first_column, 1, inverse1, lane, policy);
  } else {
    store_row<false>(at0, out, first_column, 0, inverse0, lane, policy);
    store_row<false>(at1, out, first_column, 1, inverse1, lane, policy);
  }
}

__device__ __forceinline__ bool output_stays(const AttentionParams& p, u32 fragment) {
  return p.row_tiles == 1 && Shared::word(fragment, kItemTiles) <= kStayingTiles && (i64)p.tokens * p.num_heads <= kStayingRows;
}

// Rows `at` and `at` + 8 of a partial; those behind the item's last are stored with it, and never read.
__device__ __forceinline__ void store_partial(const AttentionParams& p, const float* out, u32 at, int first_column, int half, float inverse0, float inverse1,
                                              int lane, bool live) {
  float most0 = 0.f, most1 = 0.f;
#pragma unroll
  for (int g = 0; g < kColumns / 8; g++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      // Columns behind the value's are the key's, and nobody's.
      if (V_HEAD_SIZE < kVPadded && first_column + g * 8 + (lane & 3) * 2 + e >= V_HEAD_SIZE) continue;
      most0 = larger_magnitude(most0, out[4 * g + e]);
      most1 = larger_magnitude(most1, out[4 * g + 2 + e]);
    }
  most0 = largest_of_quad(most0);
  most1 = largest_of_quad(most1);
  if (!live) return;
  const float factor0 = fixed_factor(most0), factor1 = fixed_factor(most1);
  u32* const words = partial_words(p, at, first_column, lane & 3);
  const u64 policy = staying_if(p.chunk == 0);   // else there may be any number of them
#pragma unroll
  for (int g = 0; g < kColumns / 8; g += 2)
    store_words(words + g / 2 * 128, policy, pack_fixed(out[4 * g], out[4 * g + 1], factor0), pack_fixed(out[4 * g + 2], out[4 * g + 3], factor1),
                pack_fixed(out[4 * g + 4], out[4 * g + 5], factor0), pack_fixed(out[4 * g + 6], out[4 * g + 7], factor1));
  if (lane & 3) return;
  partial_facts(p, at, half)[1] = fixed_scale(most0) * inverse0;
  partial_facts(p, at + 8, half)[1] = fixed_scale(most1) * inverse1;
}

__device__ __forceinline__ void attend(const AttentionParams& p, const Shared& shared, int half, int warp, int lane) {
  const int row = warp * 16 + (lane >> 2), first_column = half * kColumns;
  wait_for_previous_kernels();
  const u64 weights_base = matrix_descriptor(shared.base + kWeightOffset, 16);
  const u64 values_base = matrix_descriptor(shared.base + half * (kColumns / 64) * kSlabBytes, kSlabBytes);
  float out[kColumns / 2];
  Ring ring;
  Buffers buffers;
  bool last = false;
#pragma unroll 1
  for (int f = 0; !last; f++) {
    const u32 fragment = shared.fragment(f);
    float inverse0 = 0.f, inverse1 = 0.f;
#pragma unroll
    for (int q = 0; q < kQueryStages; q++) ring.advance();
    barrier_wait(shared.weights_full(buffers.buffer), buffers.phase);   // the record was there before the scores
    const int tiles = Shared::word(fragment, kTiles);
    const bool two_terms = Shared::word(fragment, kItemTiles) <= p.slow_tiles;
    last = Shared::word(fragment, kLast);
#pragma unroll 1
    for (int t = 0; t < tiles; t++) {
      barrier_wait(shared.weights_full(buffers.buffer), buffers.phase);
      barrier_wait(shared.full(ring.stage), ring.phase);
      if (load_s32(shared.base + kGrewOffset + (buffers.buffer * kScoreWarps + warp) * 4)) {
        const u32 at = shared.base + kRescaleOffset + (buffers.buffer * kRows + row) * 4;
        const float rescale0 = load_f32(at), rescale1 = load_f32(at + 32);
#pragma unroll
        for (int j = 0; j < kColumns / 2; j++) out[j] *= j & 2 ? rescale1 : rescale0;
      }
      const u64 weights = weights_base + buffers.buffer * (KV_TILE == 32 ? 4 : 8192 >> 4), values = values_base + (u64)(ring.stage * (kStageBytes >> 4));
      warpgroup_fence();
      // What rounding left over comes first: with the branch behind them, the group's end would be an empty product of its own.
      if (two_terms) {
#pragma unroll
        for (int k = 0; k < KV_TILE / 16; k++) add_products(out, weights + (kWeightBytes >> 4) + k * 2, values + k * (2048 >> 4), k > 0 || t > 0);
      }
#pragma unroll
      for (int k = 0; k < KV_TILE / 16; k++) add_products(out, weights + k * 2, values + k * (2048 >> 4), k > 0 || t > 0 || two_terms);
      warpgroup_commit();
      warpgroup_wait<0>();
      if (t == tiles - 1) {
        const u32 at = shared.base + kInverseOffset + (buffers.buffer * kRows + row) * 4;
        inverse0 = load_f32(at);
        inverse1 = load_f32(at + 32);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(shared.empty(ring.stage));
        barrier_arrive(shared.weights_empty(buffers.buffer));
      }
      ring.advance();
      buffers.advance();
    }
    const int row0 = Shared::word(fragment, kRow0), rows = Shared::word(fragment, kLiveRows), slot = Shared::word(fragment, kSlot);
    if (slot < 0) {
      store_output(p, out, row0, row, rows, first_column, inverse0, inverse1, output_stays(p, fragment));
    } else {
      store_partial(p, out, ((u32)slot * p.row_tiles + blockIdx.x) * kRows + row, first_column, half, inverse0, inverse1, lane, row < rows);
    }
  }
}

// The outputs of two streams of tiles, each with its own maximum and sum, joined where the fragment ends.
__device__ __forceinline__ void attend_streams(const AttentionParams& p, const Shared& shared, int warp, int lane) {
  const int row = warp * 16 + (lane >> 2);
  wait_for_previous_kernels();
  const u64 weights_base = matrix_descriptor(shared.base + kWeightOffset, 16), values_base = matrix_descriptor(shared.base, kSlabBytes);
  float even[kVPadded / 2], odd[kVPadded / 2];
  Ring ring;
  int phase[2] = {0, 0};
  bool last = false;
#pragma unroll 1
  for (int f = 0; !last; f++) {
    const u32 fragment = shared.fragment(f);
#pragma unroll
    for (int q = 0; q < kQueryStages; q++) ring.advance();
    barrier_wait(shared.weights_full(0), phase[0]);   // the record was there before the scores
    const int tiles = Shared::word(fragment, kTiles);
    const bool two_terms = Shared::word(fragment, kItemTiles) <= p.slow_tiles;
    last = Shared::word(fragment, kLast);
    float top[2][2] = {{kStartMax, kStartMax}, {kStartMax, kStartMax}}, sum[2][2] = {};
    auto multiply = [&](float* out, auto stream_constant, bool add, bool ends) {
      constexpr int stream = decltype(stream_constant)::value;
      barrier_wait(shared.weights_full(stream), phase[stream]);
      phase[stream] ^= 1;
      barrier_wait(shared.full(ring.stage), ring.phase);
      if (load_s32(shared.base + kGrewOffset + (stream * kScoreWarps + warp) * 4)) {
        const u32 at = shared.base + kRescaleOffset + (stream * kRows + row) * 4;
        const float rescale0 = load_f32(at), rescale1 = load_f32(at + 32);
#pragma unroll
        for (int j = 0; j < kVPadded / 2; j++) out[j] *= j & 2 ? rescale1 : rescale0;
      }
      const u64 weights = weights_base + stream * (8192 >> 4), values = values_base + (u64)(ring.stage * (kStageBytes >> 4));
      warpgroup_fence();
      if (two_terms) {
#pragma unroll
        for (int k = 0; k < KV_TILE / 16; k++) add_outputs_128(out, weights + (kWeightBytes >> 4) + k * 2, values + k * (2048 >> 4), k > 0 || add);
      }
#pragma unroll
      for (int k = 0; k < KV_TILE / 16; k++) add_outputs_128(out, weights + k * 2, values + k * (2048 >> 4), k > 0 || add || two_terms);
      warpgroup_commit();
      warpgroup_wait<0>();
      if (ends) {
        const u32 at = shared.base + kInverseOffset + (stream * kRows + row) * 4;
        sum[stream][0] = load_f32(at);
        sum[stream][1] = load_f32(at + 32);
        top[stream][0] = load_f32(at + kTopOffset - kInverseOffset);
        top[stream][1] = load_f32(at + kTopOffset - kInverseOffset + 32);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive_times(shared.empty(ring.stage), 2);
        barrier_arrive(shared.weights_empty(stream));
      }
      ring.advance();
    };
#pragma unroll 1
    for (int t = 0; t < tiles; t += 2) {
      multiply(even, Constant<0>{}, t > 0, t + 2 >= tiles);
      if (t + 1 < tiles) multiply(odd, Constant<1>{}, t > 0, t + 3 >= tiles);
    }
    float inverse[2], lse[2], weight[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float most = fmaxf(top[0][r], top[1][r]);
      weight[0][r] = exp2_fast(top[0][r] - most);
      weight[1][r] = exp2_fast(top[1][r] - most);
      const float all = sum[0][r] * weight[0][r] + sum[1][r] * weight[1][r];
      inverse[r] = all > 0.f ? 1.f / all : 0.f;
      lse[r] = all > 0.f ? most + log2_fast(all) : kStartMax;
    }
    if (tiles > 1) {
#pragma unroll
      for (int j = 0; j < kVPadded / 2; j++) even[j] = even[j] * weight[0][j >> 1 & 1] + odd[j] * weight[1][j >> 1 & 1];
    }
    if ((lane & 3) == 0) store_log_sums(p, fragment, row, lse[0], lse[1]);
    const int row0 = Shared::word(fragment, kRow0), rows = Shared::word(fragment, kLiveRows), slot = Shared::word(fragment, kSlot);
    const u32 at = ((u32)slot * p.row_tiles + blockIdx.x) * kRows + row;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float* const out = even + half * (kColumns / 2);
      if (slot < 0) store_output(p, out, row0, row, rows, half * kColumns, inverse[0], inverse[1], output_stays(p, fragment));
      else store_partial(p, out, at, half * kColumns, half, inverse[0], inverse[1], lane, row < rows);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) SYMBOL(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const Shared shared{shared_address(shared_memory)};
  const int thread = threadIdx.x;
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(shared.full(s), 1 << p.block_shift < KV_TILE ? 2 : 1);
      barrier_init(shared.empty(s), kReleases);
    }
    for (int b = 0; b < 2; b++) {
      barrier_init(shared.weights_full(b), kScoreWarps);
      barrier_init(shared.weights_empty(b), kOutputWarps);
    }
    barrier_init(shared.asked(), 1);
    barrier_init(shared.granted(), 1);
    publish_barriers();
  }
  if (thread == 384) {
    prefetch_tensor_map(maps.query);
    prefetch_tensor_map(maps.key_cache);
    if (maps.rotary_slabs) prefetch_tensor_map(maps.query_rotary);
  }
  // Schedule and block table may be older than the kernel before this one; then they are read while it still runs. Else no later kernel
  // may start, as the next layer's would read them without waiting.
  if (!p.schedule_settled) wait_for_previous_kernels();
  let_next_kernel_start();
  int start_word = 0;
  if (thread >= 384) {
    start_word = ((const i32*)(p.starts + blockIdx.y))[thread & 15];
    if (thread < 400) store_s32(shared.base + kStartOffset + 4 * (thread & 15), start_word);
  }
  __syncthreads();
  if (shared.start(kStartCount) == 0) {
    wait_for_previous_kernels();
    if (thread == 0 && one_tile_reads(p, kRows)) start_block(p);
    return;
  }
  if (thread >= 384) {
    set_registers<LOADING_REGISTERS>();
    const int warp = same_in_warp(thread >> 5);
    if (warp == 12) load<true>(p, maps, shared, start_word);
    else if (warp == 15 && p.schedule_settled && blockIdx.x == 0) prefetch_keys(p, start_word);
    else if (warp == 13 && 1 << p.block_shift < KV_TILE) load<false>(p, maps, shared, start_word);
    else if (warp == 14 && one_tile_reads(p, kRows)) {
      wait_for_previous_kernels();
      if (lane_now() == 0)
        grant_leave(p, shared.start(kStartCount), shared.start(kStartAll) * gridDim.x, shared.start(kStartTiles) > p.slow_tiles, shared.asked(), shared.granted());
    }
  } else if (thread < (kDual ? 256 : 128)) {
    set_registers<SCORE_REGISTERS>();
    score(p, shared, thread);
  } else {
    set_registers<OUTPUT_REGISTERS>();
    if constexpr (kDual) attend_streams(p, shared, thread >> 5 & 3, thread & 31);
    else attend(p, shared, same_in_warp((thread >> 7) - 1), thread >> 5 & 3, thread & 31);
  }
}
