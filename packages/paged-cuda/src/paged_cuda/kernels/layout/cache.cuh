// Where a position's latent row lies. All offsets count elements in 64 bits: a cache may hold more than 2^31.
#include "layout/params.cuh"
#include "layout/violations.cuh"

constexpr i64 kUnmapped = -1;

__device__ __forceinline__ i64 slot_offset(const AttentionParams& p, i64 slot) {
  const i64 block = slot >> p.block_shift, row = slot & ((1ll << p.block_shift) - 1);
  return block * p.page_stride + row * p.row_stride;
}

// The slot of a logical position by the block table; kUnmapped where the table has no usable entry.
__device__ __forceinline__ i64 table_slot(const AttentionParams& p, i32 sequence, i64 position, i64 token,
                                          bool reporter) {
  const i64 column = position >> p.block_shift;
  if (column >= p.max_blocks) {
    report(reporter, p.violations, kPositionBeyondTable, token, position);
    return kUnmapped;
  }
  const i32 block = p.block_table[sequence * p.table_stride + column];
  if (block < 0 || block >= p.num_blocks) {
    if (block != -1) report(reporter, p.violations, kBlockOutOfRange, token, block);
    return kUnmapped;
  }
  return ((i64)block << p.block_shift) + (position & ((1ll << p.block_shift) - 1));
}

// The slot that a new token's row is written to; kUnmapped: it is not written.
__device__ __forceinline__ i64 write_slot(const AttentionParams& p, i32 sequence, i64 position, i64 token,
                                          bool reporter) {
  if (!p.slot_mapping) return table_slot(p, sequence, position, token, reporter);
  const i64 slot = p.slot_mapping[token];
  if (slot < 0) return kUnmapped;
  if (slot >= (i64)p.num_blocks << p.block_shift) {
    report(reporter, p.violations, kSlotOutOfRange, token, slot);
    return kUnmapped;
  }
  return slot;
}
