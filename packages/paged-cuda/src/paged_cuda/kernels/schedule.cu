// Cuts the step's work into equal slices, on the device, from the lengths. One block of THREADS threads.
//
// Equal slices: each gets ceil(tiles / slices) KV tiles, at least `min_tiles`. A cut costs a partial, so items of one length are cut
// alike: in pieces of at most that, the last of which may be short, if there is a slice for each; else in whole fractions of an item or in
// whole items, if that costs under 1/16. Else a slice is a share of the items' cost, in thirds of a tile: an item's own for its query and
// its output, and that of its tiles, of which those of a short item may be slower. Otherwise slices of many short items would end last,
// and a prefill is full of them. A cut that would leave less than `min_tiles` on one side of it moves to that end of the item.
// Fixed split (`chunk` > 0): an item is cut at multiples of `chunk` KV tiles counted from position 0, so how its sums are
// split depends on its own request alone (batch invariance).
//
// Macros: THREADS
#include "layout/params.cuh"
#include "layout/schedule.cuh"
#include "ptx/dependency.cuh"

constexpr int kThreads = THREADS, kWarps = kThreads / 32;
constexpr int kShared = 4096;     // begins (of requests, of items) that are kept in shared memory
constexpr int kMaxSlices = 1024;

__shared__ int warp_sums[2][kWarps], warp_longest[kWarps], warp_shortest[kWarps];
__shared__ int shared_request_begin[kShared], shared_item_begin[kShared];
__shared__ int cut_item[kMaxSlices + 1], cut_offset[kMaxSlices + 1], cut_begin[kMaxSlices + 1];
__shared__ int split_count;

// Exclusive sums of two values over the block; the totals are added to the carries.
__device__ __forceinline__ void block_scan(int& a, int& b, int& carry_a, int& carry_b) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int x = a, y = b;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int u = __shfl_up_sync(~0u, x, d), v = __shfl_up_sync(~0u, y, d);
    if (lane >= d) { x += u; y += v; }
  }
  __syncthreads();
  if (lane == 31) { warp_sums[0][warp] = x; warp_sums[1][warp] = y; }
  __syncthreads();
  int u = lane < kWarps ? warp_sums[0][lane] : 0, v = lane < kWarps ? warp_sums[1][lane] : 0;
  const int own_u = u, own_v = v;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int s = __shfl_up_sync(~0u, u, d), t = __shfl_up_sync(~0u, v, d);
    if (lane >= d) { u += s; v += t; }
  }
  a = carry_a + __shfl_sync(~0u, u - own_u, warp) + x - a;
  b = carry_b + __shfl_sync(~0u, v - own_v, warp) + y - b;
  carry_a += __shfl_sync(~0u, u, 31);
  carry_b += __shfl_sync(~0u, v, 31);
}

__device__ __forceinline__ int clamp(int x, int low, int high) { return min(max(x, low), high); }

// New tokens of a request. Lengths that are no lengths (decreasing, beyond the tokens, negative or overflowing past) give
// none, and positions without a row in the rotary tables are left out, as in find_token.
struct Query {
  int begin, end, past, live;
};
__device__ __forceinline__ Query query_of(const AttentionParams& p, int request) {
  Query q;
  q.begin = clamp(p.cumulative_sequence_length[request], 0, p.tokens);
  q.end = clamp(p.cumulative_sequence_length[request + 1], q.begin, p.tokens);
  q.past = p.past_seqlens[request];
  q.live = q.past < 0 || q.past > 0x7fffffff - p.tokens ? 0 : q.end - q.begin;
  if (p.rotary_dim > 0) q.live = min(q.live, max(0, p.rotary_rows - q.past));
  return q;
}
__device__ __forceinline__ int items_of(const AttentionParams& p, int tokens) {
  return p.num_heads < p.row_tile ? (int)((u32)(tokens * p.num_heads + p.row_tile - 1) / (u32)p.row_tile) : tokens;
}
__device__ __forceinline__ int first_tile_of(const AttentionParams& p, const Item& item) {
  return visible_begin(item.past + (u32)item.first / (u32)p.num_heads, p.local_window_size) >> p.kv_tile_shift;
}

__device__ __forceinline__ Item make_item(const AttentionParams& p, int request, int index) {
  const Query q = query_of(p, request);
  const int heads = p.num_heads, step = max(heads, p.row_tile);
  Item item;
  item.request = request;
  item.past = q.past;
  item.first = index * step;
  item.row0 = q.begin * heads + item.first;
  item.rows = min(step, q.live * heads - item.first);
  const int end = p.causal ? q.past + (u32)(item.first + item.rows - 1) / (u32)heads + 1 : q.past + (q.end - q.begin);
  item.kv_end = (int)min((i64)end, (i64)p.max_blocks << p.block_shift);
  // At least one tile, masked if need be: an item without a key must still write its zeros.
  item.tiles = max(1, ((item.kv_end - 1) >> p.kv_tile_shift) + 1 - first_tile_of(p, item));
  item.part = 0;
  return item;
}

// Reserves one place in the list of splits for every lane of the warp that wants one.
__device__ __forceinline__ int reserve_split(bool wanted) {
  const u32 lanes = __ballot_sync(~0u, wanted);
  int base = 0;
  if (lanes && (threadIdx.x & 31) == 0) base = atomicAdd(&split_count, __popc(lanes));
  return __shfl_sync(~0u, base, 0) + __popc(lanes & ((1u << (threadIdx.x & 31)) - 1));
}

// Tokens that belong to no request: the combine kernel writes their zeros.
__device__ __forceinline__ void fill(const AttentionParams& p, int begin, int end) {
  const int place = reserve_split(begin < end);
  if (begin < end) p.splits[place] = SplitItem{0, 0, 0, (end - begin) * p.num_heads, begin * p.num_heads, {}};
}

// Index of the last of `count` ascending begins that is at most x; of equal ones the last.
__device__ __forceinline__ int last_at_or_before(const int* begins, int count, int x) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (begins[middle] <= x) low = middle; else high = middle - 1;
  }
  return low;
}

// What an item's tile costs, in thirds of one.
__device__ __forceinline__ int tile_cost(const AttentionParams& p, int tiles) { return tiles <= p.slow_tiles ? p.slow_cost : 3; }

// Where slice s is cut from the flat list.
struct Cuts {
  int payload, total;    // in KV tiles where equal items are cut alike, else in cost
  int length;            // of equal items that are cut alike, or 0
  int pieces;            // that each of them is cut in; 0: slices of whole items
};
__device__ __forceinline__ int share(const AttentionParams& p, int total, int least) {
  return max(least, (int)((u32)(total + p.slices - 1) / (u32)p.slices));
}
// `costs` and `tiles`: of all items; the same under a fixed split.
__device__ __forceinline__ Cuts cuts_of(const AttentionParams& p, int costs, int tiles, int longest, int shortest) {
  if (p.chunk) return {share(p, costs, p.min_tiles), costs, 0, 0};
  if (longest == shortest) {
    const int payload = share(p, tiles, p.min_tiles);
    const int enough = (u32)(longest + payload - 1) / (u32)payload, piece = (u32)(longest + enough - 1) / (u32)enough;
    if (longest / 2 >= payload && piece >= p.min_tiles && (i64)((u32)tiles / (u32)longest) * enough <= p.slices) return {piece, tiles, longest, enough};
    const int pieces = (u32)longest / (u32)payload;
    const int snapped = pieces ? (u32)(longest + pieces - 1) / (u32)pieces
                               : (u32)(payload + longest - 1) / (u32)longest * longest;
    if (snapped - payload <= payload / 16) return {snapped, tiles, longest, pieces};
  }
  return {share(p, costs, p.item_cost + 3 * p.min_tiles), costs, 0, 0};
}
__device__ __forceinline__ int cut(const Cuts& c, int s) {
  if (c.pieces) {
    // A payload was rounded up to whole pieces, so the last pieces of an item may be short, or empty: no cut may lie behind
    // the item's end, where the next item's first cut is.
    const int item = (u32)s / (u32)c.pieces;
    const i64 within = min((i64)(s - item * c.pieces) * c.payload, (i64)c.length);
    return (int)min((i64)item * c.length + within, (i64)c.total);
  }
  return (int)min((i64)s * c.payload, (i64)c.total);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) SYMBOL(const __grid_constant__ AttentionParams p) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  let_next_kernel_start();
  if (tid == 0) split_count = 0;
  if (p.progress && tid < 2) p.progress[tid] = 0;
  __syncthreads();

  // Where each request's items begin.
  int items = 0, unused = 0;
  int* const request_begin = p.batch <= kShared ? shared_request_begin : p.request_begin;
  for (int base = 0; base < p.batch; base += kThreads) {
    const int r = base + tid;
    int count = 0, none = 0, dead_begin = 0, dead_end = 0;
    if (r < p.batch) {
      const Query q = query_of(p, r);
      count = items_of(p, q.live);
      dead_begin = q.begin + q.live;
      dead_end = q.end;
    }
    fill(p, dead_begin, dead_end);
    block_scan(count, none, items, unused);
    if (r < p.batch) request_begin[r] = count;
  }
  if (warp == 0) {   // before the first and after the last request
    const int first = p.batch ? clamp(p.cumulative_sequence_length[0], 0, p.tokens) : p.tokens;
    const int last = p.batch ? clamp(p.cumulative_sequence_length[p.batch], 0, p.tokens) : p.tokens;
    fill(p, lane == 0 ? 0 : last, lane == 0 ? first : lane == 1 ? p.tokens : last);
  }
  items = min(items, p.max_items);
  int* const item_begin = items <= kShared ? shared_item_begin : p.item_begin;
  __syncthreads();

  // Every item's record and its place in the flat list.
  int costs = 0, seconds = 0, longest = 0, shortest = 0x7fffffff;
  const int most_cost = 0x7fffffff / max(items, 1);   // which no item inside the bounds has; lengths beyond them may not wrap the sum
  for (int base = 0; base < items; base += kThreads) {
    const int i = base + tid;
    Item item;
    int cost = 0, second = 0;   // of parts under a fixed split, else of tiles
    if (i < items) {
      const int request = last_at_or_before(request_begin, p.batch, i);
      item = make_item(p, request, i - request_begin[request]);
      const int tiles = item.tiles;
      longest = max(longest, tiles);
      shortest = min(shortest, tiles);
      cost = (int)min(p.item_cost + (i64)tiles * tile_cost(p, tiles), (i64)most_cost);
      second = tiles;
      if (p.chunk) {
        // A length beyond the bounds would have more parts than there are slots: it is cut short.
        cost = item.tiles = (int)min((i64)tiles, max(1ll, (i64)(p.max_parts - 1) * p.chunk));
        const int t = first_tile_of(p, item);
        second = (t + item.tiles - 1) / p.chunk - t / p.chunk + 1;
        if (second == 1) second = 0;
      }
    }
    const int own = second;
    block_scan(cost, second, costs, seconds);
    if (i < items) {
      item_begin[i] = cost;
      item.part = p.chunk && second + own > p.max_parts ? 0 : second;   // lengths beyond the bounds: wrong, but no wild write
      p.items[i] = item;
    }
    if (p.chunk) {
      const int place = reserve_split(own > 0);
      if (own) p.splits[place] = SplitItem{own, item.part, 0, item.rows, item.row0, {}};
    }
  }
  longest = __reduce_max_sync(~0u, longest);
  shortest = __reduce_min_sync(~0u, shortest);
  if (lane == 0) { warp_longest[warp] = longest; warp_shortest[warp] = shortest; }
  __syncthreads();
  longest = __reduce_max_sync(~0u, lane < kWarps ? warp_longest[lane] : 0);
  shortest = __reduce_min_sync(~0u, lane < kWarps ? warp_shortest[lane] : 0x7fffffff);
  const int tiles = p.chunk ? costs : seconds;
  const Cuts cuts = cuts_of(p, costs, tiles, longest, shortest);

  // Where each slice starts.
  for (int s = tid; s <= p.slices; s += kThreads) {
    const int position = s == p.slices ? cuts.total : cut(cuts, s);
    int i = items, offset = 0, at = tiles;
    if (position < cuts.total && cuts.length) {
      i = (u32)position / (u32)cuts.length;
      offset = position - i * cuts.length;
      at = position;
    } else if (position < cuts.total) {
      i = last_at_or_before(item_begin, items, position);
      offset = position - item_begin[i];
      const Item item = p.items[i];
      if (p.chunk) {
        const int t = first_tile_of(p, item);
        offset = offset ? min((t + offset + p.chunk - 1) / p.chunk * p.chunk - t, item.tiles) : 0;
        at = item_begin[i] + offset;
      } else {
        offset = max(0, offset - p.item_cost) / tile_cost(p, item.tiles);
        offset = offset < p.min_tiles ? 0 : item.tiles - offset < p.min_tiles ? item.tiles : offset;
        at = item.part + offset;
      }
      if (offset == item.tiles) { i++; offset = 0; }
    }
    cut_item[s] = i;
    cut_offset[s] = offset;
    cut_begin[s] = at;
  }
  __syncthreads();

  // Their records, and the items that a cut divides.
  for (int base = 0; base <= p.slices; base += kThreads) {
    const int s = base + tid;
    const bool here = s <= p.slices;
    const int item = here ? cut_item[s] : items, offset = here ? cut_offset[s] : 0;
    SliceStart start = {item, offset, s < p.slices ? cut_begin[s + 1] - cut_begin[s] : 0, cut_begin[p.slices], {}, {}};
    if (item < items) start.first = p.items[item];
    if (here) p.starts[s] = start;
    // A slice that starts inside an item, and is the first to do so.
    const bool splits = !p.chunk && s > 0 && offset > 0 && !(cut_item[s - 1] == item && cut_offset[s - 1] > 0);
    const int place = reserve_split(splits);
    if (splits) {
      const int last = last_at_or_before(cut_item, p.slices, item);
      const int adjust = cut_begin[s - 1] == start.first.part ? 0 : 1;   // the slice before has another item first
      p.splits[place] = SplitItem{last - s + 2, 2 * (s - 1), adjust, start.first.rows, start.first.row0, {}};
    }
  }
  __syncthreads();
  for (int k = tid; k < p.combine_entries; k += kThreads) p.splits[split_count + k].parts = -1;
  // Nothing here depends on append, so the two run together; whoever waits for this kernel waits for append as well.
  wait_for_previous_kernels();
}
