// What the sm_90 kernel is told beside AttentionParams: where the copy engine finds its boxes.
//
// The host encodes the maps for the arrays of a run (paged_cuda/tensor_maps.py mirrors the struct).
#include "layout/types.cuh"

struct alignas(64) TensorMap {
  u64 words[16];   // opaque, written by cuTensorMapEncodeTiled
};

struct alignas(64) TensorMaps {
  TensorMap key_cache;      // (head_size, block_size, num_blocks), boxes of 64 channels x min(block_size, KV_TILE) rows
  TensorMap query;          // (head_size, rows, tokens), boxes of 64 channels x query_box rows
  TensorMap query_rotary;   // the rotated channels as whole slabs, otherwise as query
  i32 query_box;            // rows of a query box: a divisor of 32
  i32 query_rows;           // packed rows of the query maps' second dimension: all of the call, or one token's heads
  i32 rotary_slab;          // first slab of 64 channels that comes from query_rotary
  i32 rotary_slabs;         // how many do; 0: none
  i32 two_term_keys;        // items with at most so many keys multiply V with two-term weights
};
