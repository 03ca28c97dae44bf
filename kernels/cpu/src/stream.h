// What streams over a cache share, whatever its type (stream.cpp, stream_int8.cpp, which alone include this): where
// keys lie, what comes next, running sums.
#pragma once

#include <algorithm>

#include "stream_softmax.h"

#if defined(__AMX_BF16__)

namespace headrace {
namespace {

// Keys of a tile: as many lie side by side, since blocks of the cache hold whole tiles.
constexpr int64_t TILE_KEYS = 16, LINE = 64;

// How far ahead of what is computed keys are fetched: longer than memory takes to answer.
constexpr int64_t KEYS_AHEAD = 32;

// 64 keys of a sequence.
struct KeyBlock {
  int64_t count;
  int64_t slots[KEY_BLOCK / TILE_KEYS];  // of the first of every 16 keys
};

// LANES: query heads that a tile has room for, 4 or, where a KV head has more of them, 16.
template <class S, int LANES>
class StreamBase {
 public:
  StreamBase(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next)
      : call_(call), step_(call.step), task_(task), next_(next), group_(call.group()), dim_(step_.head_dim),
        heads_(task.num_kv_heads), stride_(step_.num_kv_heads * dim_), keys_((const S*)step_.keys[call.layer]),
        values_((const S*)step_.values[call.layer]), scale_(LOG2_E / std::sqrt(float(dim_))),
        coming_(std::min<int64_t>(task.first_key + KEYS_AHEAD, round_up(task.last_key, TILE_KEYS))) {
    // Where a task has all KV heads of a token, tiles lie in one run.
    const int64_t row = heads_ * dim_ * int64_t(sizeof(S));
    const bool whole = heads_ == step_.num_kv_heads;
    runs_ = whole ? 1 : TILE_KEYS;
    run_lines_ = ceil_div(whole ? row * TILE_KEYS : row, LINE);
  }

 protected:
  static int64_t sums_bytes(int64_t heads, int64_t dim) {
    return heads * (int64_t(sizeof(Gathered)) + LANES * dim * 4);
  }

  // Begins with nothing gathered, in `scratch` of sums_bytes; returns what lies behind.
  uint8_t* clear(uint8_t* scratch) {
    gathered_ = (Gathered*)scratch;
    acc_ = (float*)(gathered_ + heads_);
    std::memset(acc_, 0, heads_ * LANES * dim_ * 4);
    for (int64_t h = 0; h < heads_; ++h) gathered_[h] = {splat(NOTHING), vf{}};
    return (uint8_t*)(acc_ + heads_ * LANES * dim_);
  }

  const bf16* query(int64_t head, int64_t q) const {
    const int64_t token = step_.query_start[task_.row];
    return (const bf16*)call_.query + token * call_.query_ld + ((task_.kv_head + head) * group_ + q) * dim_;
  }

  KeyBlock find(int64_t first) const {
    KeyBlock block;
    block.count = std::min<int64_t>(KEY_BLOCK, task_.last_key - first);
    for (int64_t j = 0; j < block.count; j += TILE_KEYS) block.slots[j / TILE_KEYS] = slot_of(task_, first + j);
    return block;
  }

  // Element of keys and values at which a slot's KV head begins.
  int64_t at(int64_t slot, int64_t head) const { return slot * stride_ + (task_.kv_head + head) * dim_; }

  // Fetches the next lines of keys and as many of values into the second-level cache, so many for every 64 features of
  // a head. Called after every few products, since only so many lines can be on their way at once: asked for in one go
  // they would hold up what computes, and memory would rest afterwards.
  void fetch(int lines) {
    for (int64_t left = lines * dim_ / 64; left > 0; --left) {
      if (lines_left_ == 0 && !fetch_run()) return;
      __builtin_prefetch(next_key_, 0, 2);
      __builtin_prefetch(next_value_, 0, 2);
      next_key_ += LINE;
      next_value_ += LINE;
      --lines_left_;
    }
  }

  // Before keys are gathered of which `peak` is the highest score.
  void follow(int64_t head, vf peak) {
    Gathered& gathered = gathered_[head];
    const vi grows = peak > gathered.top + SLACK;
    if (!any_lane(grows)) return;
    const vf top = grows ? peak : gathered.top;
    const vf factor = vexp2_fast(gathered.top - top);
    gathered.total *= factor;
    gathered.top = top;
    for (int64_t q = 0; q < group_; ++q) {
      float* acc = acc_ + (head * LANES + q) * dim_;
      for (int64_t d = 0; d < dim_; d += VL) store(acc + d, load(acc + d) * factor[q]);
    }
  }

  // Writes results, or what has to be merged. in_order(acc, factor, dim, out): the sums times factor as the model
  // orders features.
  template <class F>
  void write(Workspace& ws, F&& in_order) const {
    const int64_t token = step_.query_start[task_.row], partial_size = decode_partial(step_);
    for (int64_t h = 0; h < heads_; ++h) {
      alignas(64) float tops[VL], totals[VL];
      store(tops, gathered_[h].top);
      store(totals, gathered_[h].total);
      for (int64_t q = 0; q < group_; ++q) {
        float total = 0.0f;
        for (int lane = 0; lane < VL; lane += LANES) total += totals[lane + q];
        const float* acc = acc_ + (h * LANES + q) * dim_;
        if (task_.partial < 0) {
          const int64_t head = (task_.kv_head + h) * group_ + q;
          in_order(acc, 1.0f / total, dim_, (bf16*)call_.out + token * call_.out_ld + head * dim_);
          continue;
        }
        float* partial = ws.partials.get<float>(0) + task_.partial + h * task_.head_stride + q * partial_size;
        partial[0] = tops[q] / LOG2_E;
        partial[1] = total;
        in_order(acc, 1.0f, dim_, partial + 2);
      }
    }
  }

  const AttentionCall& call_;
  const HrStep& step_;
  const AttentionTask& task_;
  const AttentionTask* const next_;
  const int64_t group_, dim_, heads_, stride_;
  const S* const keys_;
  const S* const values_;
  const float scale_;
  Gathered* gathered_;  // of each KV head
  float* acc_;          // [KV heads][LANES][dim], features in the order of their tiles

 private:
  int64_t slot_of(const AttentionTask& task, int64_t key) const {
    const int32_t* table = step_.block_tables + task.row * step_.table_width;
    return table[key / step_.block_size] * step_.block_size + key % step_.block_size;
  }

  // Begins with the next tile, or its next key where KV heads lie apart; false: nothing comes within KEYS_AHEAD, of
  // this task or the next.
  bool fetch_run() {
    if (runs_left_ == 0) {
      const AttentionTask* task = &task_;
      int64_t key = coming_;
      if (key >= task_.last_key) {
        const int64_t over = key - round_up(task_.last_key, TILE_KEYS);
        if (!next_ || next_->kind != task_.kind || next_->num_kv_heads != heads_ || over >= KEYS_AHEAD) return false;
        task = next_;
        key = next_->first_key + over;
        if (key >= next_->last_key) return false;
      }
      const int64_t from = slot_of(*task, key) * stride_ + task->kv_head * dim_;
      next_key_ = (const char*)(keys_ + from);
      next_value_ = (const char*)(values_ + from);
      coming_ += TILE_KEYS;
      runs_left_ = runs_;
    } else {
      const int64_t gap = stride_ * int64_t(sizeof(S)) - run_lines_ * LINE;
      next_key_ += gap;
      next_value_ += gap;
    }
    --runs_left_;
    lines_left_ = run_lines_;
    return true;
  }

  int64_t coming_;  // first key that no run was begun for, counted on into the next task
  int64_t runs_, run_lines_, runs_left_ = 0, lines_left_ = 0;
  const char* next_key_ = nullptr;
  const char* next_value_ = nullptr;
};

// A task by a kind of stream.
template <class Stream>
void stream(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task, const AttentionTask* next) {
  Stream::configure(call.group());
  Stream stream(ws.thread_scratch[rank], call, task, next);
  stream.run();
  stream.finish(ws);
  _tile_loadconfig(&TILE_CONFIG);
}

}  // namespace
}  // namespace headrace

#endif
