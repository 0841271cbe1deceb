// From a token's row to its sequence, its position and the keys it may see.
#include "layout/params.cuh"
#include "layout/violations.cuh"

struct Token {
  i32 sequence;     // -1: a row that no live sequence owns
  i64 position;
  i64 kv_length;    // past plus the new tokens of the sequence
  Violation fault;  // why a sequence's row is treated as no row
};

struct KeyRange {
  i64 begin;
  i64 end;
};

// The last sequence that starts at or before the token owns it; empty sequences before it start there too.
__device__ __forceinline__ Token find_token(const AttentionParams& p, i64 token) {
  i32 low = 0, high = p.batch;
  while (low < high) {
    const i32 middle = low + (high - low + 1) / 2;
    if (p.cumulative_sequence_length[middle] <= token) low = middle;
    else high = middle - 1;
  }
  if (low == p.batch) return {-1, 0, 0, kNone};
  const i64 begin = max(0, p.cumulative_sequence_length[low]);
  const i64 end = min(p.tokens, p.cumulative_sequence_length[low + 1]);
  if (token < begin || token >= end) return {-1, 0, 0, kNone};
  const i64 past = p.past_seqlens[low];
  const i64 position = past + token - begin;
  if (past < 0) return {-1, past, 0, kNegativePast};
  // A position without a row in the rotary tables has no defined angle: nothing is written, the output is zero.
  if (p.rotary_dim > 0 && position >= p.rotary_rows) return {-1, position, 0, kPositionBeyondRotary};
  return {low, position, past + end - begin, kNone};
}

__device__ __forceinline__ KeyRange visible_keys(const AttentionParams& p, const Token& token) {
  i64 begin = 0, end = p.causal ? token.position + 1 : token.kv_length;
  if (p.local_window_size > 0) begin = max(0ll, token.position - p.local_window_size + 1);
  return {begin, min(end, (i64)p.max_blocks << p.block_shift)};
}
