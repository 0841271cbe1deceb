// The schedule that one small kernel writes once a step and the attend and combine kernels of every layer read.
//
// An item is a group of query rows of one request that share a range of the KV cache: ROW_TILE packed rows (token-major,
// row = token * heads + head) when a token has fewer heads than that, else all heads of one token, cut into
// `row_tiles` row tiles.  A slice is a contiguous run of the flat list "all KV tiles of all items": one CTA (or one CTA
// for each row tile) works through one slice.  Split points depend on lengths, heads and the number of slices only.
#include "layout/params.cuh"

struct Item {
  i32 request;   // row of block_table and past_seqlens
  i32 row0;      // first packed row, counted over all tokens of the call
  i32 rows;      // live rows of the item
  i32 past;      // cached length before this call
  i32 first;     // first packed row, counted from the request's first token
  i32 kv_end;    // no row of the item sees this position or a later one
  i32 tiles;     // KV tiles from the first visible one to kv_end
  i32 part;      // fixed split: slot of the item's first partial; else the KV tiles of all items before this one
};
struct SliceStart {
  i32 item;      // item at which the slice starts
  i32 offset;    // KV tiles of that item which belong to earlier slices
  i32 count;     // KV tiles of the slice; 0: nothing to do
  i32 all;       // KV tiles of all slices
  Item first;    // a copy, so that one read tells a CTA all that it needs
  i32 pad_to_64[4];
};
// What is left to the combine kernel: an item in `parts` parts, or (parts 0) rows that belong to no request and get zeros.
// The list ends with parts -1, once for each CTA group of the combine kernel.
struct SplitItem {
  i32 parts;
  i32 slot, adjust;    // slot of part p: slot + p * step + (p == 0 ? adjust : 0)
  i32 rows, row0;      // packed rows, counted over all tokens of the call
  i32 pad[3];
};
static_assert(sizeof(Item) == 32 && sizeof(SliceStart) == 64 && sizeof(SplitItem) == 32, "records are read as 16-byte words");

// Whether one row tile of so many rows reads a request's keys, on average over the batch: a decode of few heads. Then the memory is the limit,
// and nobody reads the keys again but where requests share pages.
__device__ __forceinline__ bool one_tile_reads(const AttentionParams& p, i32 rows) { return (i64)p.tokens * p.num_heads <= (i64)p.batch * rows; }

// First position that the query at `position` sees (a window counts the query's own position).
__device__ __forceinline__ i32 visible_begin(i32 position, i32 window) {
  return window > 0 ? max(0, position - window + 1) : 0;
}

// Offset of packed row `row` (token * heads + head) in rows of `width` elements a head, tokens `stride` elements apart.
__device__ __forceinline__ i64 packed_row_offset(u32 row, u32 heads, i64 stride, i32 width) {
  if (stride == (i64)heads * width) return (i64)row * width;
  const u32 token = row / heads;
  return token * stride + (i64)(row - token * heads) * width;
}
