// What the sm_90 kernel is told beside AttentionParams: where the copy engine finds its boxes.
//
// The host encodes the maps for the arrays of a run (paged_cuda/tensor_maps.py mirrors the struct).
#include "layout/types.cuh"

struct alignas(64) TensorMap {
  u64 words[16];   // opaque, written by cuTensorMapEncodeTiled
};

// Every map has four dimensions: channel, row, slab of 64 channels, plane (a page, or a token). A map of whole rows counts channels
// inside a slab and its boxes hold all its slabs; a map of single slabs counts all channels and has one slab.
struct alignas(64) TensorMaps {
  TensorMap key_cache;      // planes are pages; boxes of min(block_size, KV_TILE) rows
  TensorMap query;          // boxes of query_box rows
  TensorMap query_rotary;   // the rotated channels, otherwise as query
  i32 cache_slabs;          // of a box of key_cache: 1, or all
  i32 single_slabs;         // whether the query's boxes hold one slab
  i32 query_box;            // rows of a query box: a divisor of KV_TILE
  i32 query_rows;           // packed rows of a plane of the query: all of the call, or one token's heads
  i32 rotary_slab;          // first slab of 64 channels that comes from query_rotary
  i32 rotary_slabs;         // how many do; 0: none
};
