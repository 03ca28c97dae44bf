// Paged attention and what precedes it, inside a parallel call.
#pragma once

#include <vector>

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

// One task each: of few query rows by vectors (decode.cpp), or of any number by matrix products (tiled.cpp). A is the
// type of queries and results, S that of the cache: float, bf16 or, with scales beside, int8_t.
template <class A, class S>
void attend_decode(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task);
template <class A, class S>
void attend_tile(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task);
// Several KV heads of one token by matrix products on the cache as it lies (stream.cpp, stream_int8.cpp); `next` is
// fetched meanwhile.
void attend_stream(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task,
                   const AttentionTask* next);
void attend_int8_stream(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task,
                        const AttentionTask* next);
bool can_stream(const HrStep& step, int64_t group);
template <class A>
void merge_decode(Workspace& ws, const AttentionCall& call, const MergeTask& task);
template <class A>
void merge_tiles(Workspace& ws, const AttentionCall& call, const MergeTask& task);

// Makes tiles of rows that begin with the same blocks, and removes them from `rows`, which are those still to be planned
// (sharing.cpp). queries: of a tile, at most.
void plan_shared(Workspace& ws, const HrStep& step, int64_t group, int64_t queries, std::vector<int32_t>& rows);

// Query rows (tokens times heads) of a tile: enough to make loading its keys cheap, few enough for the cache, which holds
// so many features of them, and to give every thread some tasks.
constexpr int64_t TILE_QUERIES = HAS_AMX ? 192 : 96, MOST_TILE_QUERIES = HAS_AMX ? 768 : 96;
constexpr int64_t TILE_FEATURES = MOST_TILE_QUERIES * 64, TILES_PER_THREAD = 4;
// Query rows of a tile that are computed together.
constexpr int64_t BAND = 2 * PANEL;
// Keys of a vector task; longer rows are split and merged.
constexpr int64_t DECODE_KEYS = 256;
constexpr int64_t KEY_BLOCK = 64;
// Keys of a tile that are loaded together; segments begin at multiples of it.
constexpr int64_t PAIR = 2 * KEY_BLOCK;
// The same of a stream, which costs more to begin.
constexpr int64_t STREAM_KEYS = 512;

// Tiles sum up segment by segment, so that these can be spread over threads without a different bit: the end of the one
// that holds `key`. Short ones first, since short rows are to be spread too.
inline int64_t segment_end(int64_t key) {
  return key < 128 ? 128 : key < 256 ? 256 : key < 512 ? 512 : (key / 1024 + 1) * 1024;
}

// Floats of a vector task's partial result, per query head: maximum, sum, and unnormalized values.
inline int64_t decode_partial(const HrStep& step) { return 2 + round_up(step.head_dim, VL); }
// Floats that a tile gathers: values, reference and sum of each query row.
inline int64_t state_floats(int64_t bands, int64_t width) { return bands * BAND * (width + 2); }

// Walks a row's positions through its block table; one division at the start, none a key.
class Slots {
 public:
  Slots(const HrStep& step, int64_t row, int64_t position, int64_t kv_head)
      : block_(step.block_tables + row * step.table_width + position / step.block_size),
        in_block_(position % step.block_size),
        block_size_(step.block_size),
        stride_(step.num_kv_heads * step.head_dim),
        head_(kv_head * step.head_dim) {}

  // Element offset of the next position's key (or value).
  int64_t next() {
    const int64_t offset = (*block_ * block_size_ + in_block_) * stride_ + head_;
    if (++in_block_ == block_size_) {
      in_block_ = 0;
      ++block_;
    }
    return offset;
  }

 private:
  const int32_t* block_;
  int64_t in_block_;
  const int64_t block_size_;
  const int64_t stride_;
  const int64_t head_;
};

}  // namespace headrace
