// Paged attention and what precedes it, inside a parallel call.
#pragma once

#include "team.h"
#include "types.h"
#include "workspace.h"

namespace headrace {

// Queries in, attended values out. Both hold [tokens, num_heads * head_dim] with their own row lengths, in the step's
// dtype.
struct AttentionCall {
  const HrStep& step;
  int64_t layer;
  int64_t num_heads;
  const void* query;
  int64_t query_ld;  // elements
  void* out;
  int64_t out_ld;  // elements

  int64_t group() const { return num_heads / step.num_kv_heads; }
};

// Splits the batch into tasks, once a step; call before the parallel part. Depends on each row alone, not on the rest
// of the batch, so a row's result does not either.
void plan_attention(Workspace& ws, const HrStep& step, int64_t group);

// All rows of the batch, decodes and prefills alike.
void attend(Team& team, Workspace& ws, const AttentionCall& call);

// Rotates queries and keys of qkv [tokens, (heads + 2 kv heads) * head_dim], writes keys and values to their slots and
// the queries to query_out (which may be qkv itself).
void rotate_and_cache(Team& team, const HrStep& step, int64_t layer, int64_t num_heads, void* qkv, void* query_out,
                      int64_t query_ld);

// One task each (decode.cpp, prefill.cpp).
template <class T>
void attend_decode(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task);
template <class T>
void attend_prefill(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task);
template <class T>
void merge_partials(Workspace& ws, const AttentionCall& call, const MergeTask& task);

// Query rows (tokens times heads) of a prefill task: enough to make packing its keys cheap, few enough for the cache.
constexpr int64_t PREFILL_ROWS = 96;
// Keys of a decode task; longer rows are split and merged.
constexpr int64_t DECODE_KEYS = 256;
constexpr int64_t KEY_BLOCK = 64;

// A partial result: per query head maximum, sum, and unnormalized values padded to whole vectors.
inline int64_t partial_stride(const HrStep& step) { return 2 + round_up(step.head_dim, VL); }

// Element offset of a position's key (or value) for one KV head.
inline int64_t slot_offset(const HrStep& step, const int32_t* table, int64_t position, int64_t kv_head) {
  const int64_t slot = int64_t(table[position / step.block_size]) * step.block_size + position % step.block_size;
  return (slot * step.num_kv_heads + kv_head) * step.head_dim;
}

}  // namespace headrace
