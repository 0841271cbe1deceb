// What every kernel of one step is told: one struct, passed by value.
//
// The host fills it before each launch (paged_cuda/params.py mirrors it field by field; a CPU test compares the
// two layouts). Only addresses, extents and frozen attributes stand here: lengths are read from device memory,
// so that a captured launch stays right when they change. Strides count elements.
#include "layout/types.cuh"

struct AttentionParams {
  const u16* query;                       // (tokens, num_heads * head_size)
  const u16* key;                         // (tokens, head_size)
  u16* key_cache;                         // (num_blocks, block_size, 1, head_size)
  const i32* cumulative_sequence_length;  // (batch + 1)
  const i32* past_seqlens;                // (batch)
  const i32* block_table;                 // (batch, max_blocks)
  const i32* slot_mapping;                // (tokens), or null: slots are derived from the block table
  const u16* cos_cache;                   // (rotary_rows, rotary_dim / 2)
  const u16* sin_cache;                   // (rotary_rows, rotary_dim / 2)
  u16* output;                            // (tokens, num_heads * v_head_size)
  float* lse;                             // (tokens, num_heads) natural log, or null
  u64* violations;                        // debug kernels only, see layout/violations.cuh
  // Regions of the workspace, null where the path has no such region.
  u16* query_rotary;           // (tokens, num_heads, query_width): the query's channels from query_first on, rotated
  struct Item* items;          // (max_items)
  struct SliceStart* starts;   // (slices + 1)
  struct SplitItem* splits;
  i32* item_begin;             // (max_items): cost of the items before one, in thirds of a KV tile; whole tiles under a fixed split
  i32* request_begin;          // (batch): items before a request
  u16* partial_output;         // (slots, row_tiles, ROW_TILE, padded v_head_size): integers, whose scale makes them outputs divided by their own sum
  float* partial_facts;        // log-sum-exps and scales. Their order, and that of the integers: layout/row_partial.cuh, for sm90 layout/paired_partial.cuh
  u32* progress;               // (2): see sm90/pace.cuh

  i64 query_stride;   // token to token
  i64 key_stride;     // token to token
  i64 output_stride;  // token to token
  i64 page_stride;    // block to block in the cache
  i64 row_stride;     // slot to slot inside a block
  i64 table_stride;   // sequence to sequence in the block table

  i32 tokens;
  i32 batch;
  i32 max_blocks;  // columns of the block table
  i32 num_blocks;
  i32 block_shift;  // log2(block_size)
  i32 num_heads;
  i32 head_size;
  i32 v_head_size;
  i32 rotary_dim;  // 0: no rotary
  i32 rotary_offset;
  i32 rotary_rows;
  i32 rotary_interleaved;
  i32 query_first;  // the channels of query_rotary: all rotated ones, and others as the path likes
  i32 query_width;
  i32 local_window_size;  // <= 0: unlimited
  i32 causal;
  // The split schedule, from bounds alone (layout/schedule.cuh).
  i32 slices;
  i32 row_tiles;
  i32 row_tile;
  i32 kv_tile_shift;     // log2(KV rows of a tile)
  i32 min_tiles;         // of a slice, but for the last piece of an item
  i32 item_cost;         // of an item beside its tiles, in thirds of one
  i32 slow_tiles;        // items with at most so many tiles take longer for each
  i32 slow_cost;         // of such a tile, in thirds of one
  i32 chunk;             // KV tiles of a part under a fixed split; 0: equal slices
  i32 max_items;
  i32 max_parts;         // of all items together, fixed split
  i32 combine_entries;   // splits that the combine kernel takes at a time
  i32 schedule_settled;  // 1: the schedule was complete before the previous kernel began
  float scale;
  float softcap;  // <= 0: off
};
