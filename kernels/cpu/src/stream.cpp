// Attention of one query token against a cache of bf16 or int8, by AMX: a pass over keys and values in the order they lie
// in memory, all KV heads of a token together. Softmax is online, as in tiled.cpp.
//
// Scores are [keys][query heads]: keys are the left operand as they lie in the cache. The sums are [query heads]
// [features]: the values of two keys are interleaved to be the right one, which takes a fifth of what transposing them
// would. That order of features is undone at the end.
#include <algorithm>

#include "stream_softmax.h"
#include "stream_tiles.h"

namespace headrace {

#if defined(__AMX_BF16__)
namespace {

// 64 keys of a sequence.
struct KeyBlock {
  int64_t count;
  int64_t slots[KEY_BLOCK / TILE_KEYS];  // of the first of every 16 keys, which lie side by side
};

// LANES: 4, or 16 where a KV head has more than four query heads.
template <class S, int LANES>
class Stream {
 public:
  Stream(Buffer& scratch, const AttentionCall& call, const AttentionTask& task)
      : call_(call), step_(call.step), task_(task), group_(call.group()), dim_(step_.head_dim),
        stride_(step_.num_kv_heads * dim_), keys_((const S*)step_.keys[call.layer]),
        values_((const S*)step_.values[call.layer]), scale_(LOG2_E / std::sqrt(float(dim_))) {
    const int64_t heads = task.num_kv_heads;
    const int64_t halves = heads * (dim_ * LANES + KEY_BLOCK * (LANES + dim_)) + TILE_KEYS * dim_;
    const int64_t floats = heads * LANES * (dim_ + KEY_BLOCK);
    auto* bytes = scratch.get<uint8_t>(halves * 2 + floats * 4 + heads * int64_t(sizeof(Gathered)));
    gathered_ = (Gathered*)bytes;
    acc_ = (float*)(gathered_ + heads);
    scores_ = acc_ + heads * LANES * dim_;
    queries_ = (uint16_t*)(scores_ + heads * KEY_BLOCK * LANES);
    weights_ = (bf16*)(queries_ + heads * dim_ * LANES);
    interleaved_ = weights_ + heads * KEY_BLOCK * LANES;
    staged_ = interleaved_ + heads * KEY_BLOCK * dim_;
    std::memset(acc_, 0, heads * LANES * dim_ * 4);
    for (int64_t h = 0; h < heads; ++h) gathered_[h] = {splat(NOTHING), vf{}};
    pack_queries();
  }

  // Every 16 keys and their values are read once, in the order of memory, while those behind them are fetched. Tiles are
  // loaded long after vectors stored them.
  void run(const AttentionTask* next) {
    const int64_t heads = task_.num_kv_heads;
    for (int64_t first = task_.first_key; first < task_.last_key; first += KEY_BLOCK) {
      const KeyBlock block = find(task_, first);
      for (int64_t key = 0; key < round_up(block.count, RUN); key += TILE_KEYS) {
        const int64_t ahead = behind(first + key + TILE_KEYS, next);
        if (key < block.count) {
          for (int64_t h = 0; h < heads; ++h) multiply_keys(block.slots[key / TILE_KEYS], h, key);
        }
        interleave(block, key, ahead);
      }
      for (int64_t h = 0; h < heads; ++h) soften(block, h);
      for (int64_t h = 0; h < heads; ++h) add_values(block.count, h);
    }
  }

  void finish(Workspace& ws) const {
    const int64_t token = step_.query_start[task_.row], partial_size = decode_partial(step_);
    for (int64_t h = 0; h < task_.num_kv_heads; ++h) {
      const int64_t first_head = (task_.kv_head + h) * group_;
      alignas(64) float tops[VL], totals[VL];
      store(tops, gathered_[h].top);
      store(totals, gathered_[h].total);
      for (int64_t q = 0; q < group_; ++q) {
        float total = 0.0f;
        for (int lane = 0; lane < VL; lane += LANES) total += totals[lane + q];
        const float* acc = acc_ + (h * LANES + q) * dim_;
        if (task_.partial < 0) {
          bf16* out = (bf16*)call_.out + token * call_.out_ld + (first_head + q) * dim_;
          in_order(acc, 1.0f / total, dim_, out);
          continue;
        }
        float* partial = ws.partials.get<float>(0) + task_.partial + h * task_.head_stride + q * partial_size;
        partial[0] = tops[q] / LOG2_E;
        partial[1] = total;
        in_order(acc, 1.0f, dim_, partial + 2);
      }
    }
  }

 private:
  KeyBlock find(const AttentionTask& task, int64_t first) const {
    KeyBlock block;
    block.count = std::min<int64_t>(KEY_BLOCK, task.last_key - first);
    for (int64_t j = 0; j < block.count; j += TILE_KEYS) block.slots[j / TILE_KEYS] = slot_of(task, first + j);
    return block;
  }

  int64_t slot_of(const AttentionTask& task, int64_t key) const {
    const int32_t* table = step_.block_tables + task.row * step_.table_width;
    return table[key / step_.block_size] * step_.block_size + key % step_.block_size;
  }

  // Where the keys from `first` on begin, or what this thread attends to next; -1: nowhere.
  int64_t behind(int64_t first, const AttentionTask* next) const {
    const AttentionTask* task = &task_;
    if (first >= task_.last_key) {
      if (!next || next->kind != task_.kind || next->num_kv_heads != task_.num_kv_heads) return -1;
      task = next;
      first = next->first_key;
    }
    return slot_of(*task, first) * stride_ + task->kv_head * dim_;
  }

  void pack_queries() {
    const int64_t token = step_.query_start[task_.row];
    std::memset(queries_, 0, task_.num_kv_heads * dim_ * LANES * 2);
    for (int64_t h = 0; h < task_.num_kv_heads; ++h) {
      const auto* query = (const bf16*)call_.query + token * call_.query_ld + (task_.kv_head + h) * group_ * dim_;
      auto* to = (uint32_t*)(queries_ + h * dim_ * LANES);
      for (int64_t q = 0; q < group_; ++q) {
        for (int64_t d = 0; d < dim_; d += 2) to[d / 2 * LANES + q] = load_as<uint32_t>(query + q * dim_ + d);
      }
    }
  }

  // Values of 16 keys -> tiles. Meanwhile the 16 at `ahead` come into the cache.
  void interleave(const KeyBlock& block, int64_t key, int64_t ahead) {
    const int64_t heads = task_.num_kv_heads, keys = std::clamp<int64_t>(block.count - key, 0, TILE_KEYS);
    const S* rows = values_ + (keys > 0 ? block.slots[key / TILE_KEYS] * stride_ : 0) + task_.kv_head * dim_;
    bf16* tiles = interleaved_ + key / RUN * RUN * dim_ + key % RUN * VL;
    static constexpr S zeros[MAX_DIM] = {};  // for slots past the end, which may hold anything
    for (int64_t i = 0; i < TILE_KEYS; i += 2) {
      if (ahead >= 0) fetch(ahead + i * stride_);
      for (int64_t h = 0; h < heads; ++h) {
        const S* row = rows + i * stride_ + h * dim_;
        interleave_pair(i < keys ? row : zeros, i + 1 < keys ? row + stride_ : zeros,
                        tiles + h * KEY_BLOCK * dim_ + i * VL);
      }
    }
  }

  // Two keys' values -> their row of every tile.
  void interleave_pair(const S* even, const S* odd, bf16* to) const {
    for (int64_t d = 0; d < dim_; d += 32) {
      const vu a = load_32(even + d), b = load_32(odd + d);
      store_as(to + d * RUN, interleaved(a, b, std::false_type{}));
      store_as(to + (d + VL) * RUN, interleaved(a, b, std::true_type{}));
    }
  }

  // Two keys and their values.
  void fetch(int64_t at) const {
    const int64_t width = task_.num_kv_heads * dim_;
    for (int64_t row = 0; row < 2; ++row, at += stride_) {
      for (int64_t d = 0; d < width; d += 64 / int64_t(sizeof(S))) {
        __builtin_prefetch(keys_ + at + d);
        __builtin_prefetch(values_ + at + d);
      }
    }
  }

  // Scores of 16 keys.
  void multiply_keys(int64_t slot, int64_t head, int64_t key) {
    const uint16_t* query = queries_ + head * dim_ * LANES;
    const S* rows = keys_ + slot * stride_ + (task_.kv_head + head) * dim_;
    const bf16* keys = (const bf16*)rows;
    int64_t ld = stride_;
    if constexpr (sizeof(S) == 1) {
      for (int64_t i = 0; i < TILE_KEYS; ++i) {
        for (int64_t d = 0; d < dim_; d += 32) store_as(staged_ + i * dim_ + d, load_32(rows + i * stride_ + d));
      }
      keys = staged_;
      ld = dim_;
      __asm__ volatile("" ::: "memory");
    }
    _tile_zero(6);
    for (int64_t d = 0; d < dim_; d += 32) {
      _tile_loadd(4, query + d * LANES, LANES * 4);
      _tile_loadd(5, keys + d, ld * 2);
      _tile_dpbf16ps(6, 5, 4);
    }
    _tile_stored(6, scores_ + (head * KEY_BLOCK + key) * LANES, LANES * 4);
    __asm__ volatile("" ::: "memory");
  }

  void gather_scales(const KeyBlock& block, int64_t head, const float* from, float* to) const {
    for (int64_t j = 0; j < block.count; ++j) {
      const int64_t slot = block.slots[j / TILE_KEYS] + j % TILE_KEYS;
      to[j] = from[slot * step_.num_kv_heads + task_.kv_head + head];
    }
    for (int64_t j = block.count; j < KEY_BLOCK; ++j) to[j] = 0.0f;
  }

  // Scores -> weights.
  void soften(const KeyBlock& block, int64_t head) {
    float* scores = scores_ + head * KEY_BLOCK * LANES;
    Gathered& gathered = gathered_[head];
    float key_scales[KEY_BLOCK], value_scales[KEY_BLOCK];
    constexpr bool SCALED = sizeof(S) == 1;
    if constexpr (SCALED) {
      gather_scales(block, head, step_.key_scales[call_.layer], key_scales);
      gather_scales(block, head, step_.value_scales[call_.layer], value_scales);
      for (int i = 0; i < KEY_BLOCK * LANES / VL; ++i) {
        store(scores + i * VL, load(scores + i * VL) * spread<LANES>(key_scales, i));
      }
    }
    const vf peak = find_peak<LANES>(scores, block.count) * scale_;
    const vi grows = peak > gathered.top + SLACK;
    if (any_lane(grows)) move_reference(head, grows ? peak : gathered.top);
    bf16* weights = weights_ + head * KEY_BLOCK * LANES;
    gathered.total += make_weights<LANES>(scores, scale_, gathered.top, SCALED ? value_scales : nullptr, weights);
  }

  void move_reference(int64_t head, vf top) {
    Gathered& gathered = gathered_[head];
    const vf factor = vexp2_fast(gathered.top - top);
    gathered.total *= factor;
    gathered.top = top;
    for (int64_t q = 0; q < group_; ++q) {
      float* acc = acc_ + (head * LANES + q) * dim_;
      for (int64_t d = 0; d < dim_; d += VL) store(acc + d, load(acc + d) * factor[q]);
    }
  }

  // sums += weights * values, 64 features at a time.
  void add_values(int64_t keys, int64_t head) {
    float* acc = acc_ + head * LANES * dim_;
    const bf16* values = interleaved_ + head * KEY_BLOCK * dim_;
    __asm__ volatile("" ::: "memory");
    for (int64_t d = 0; d < dim_; d += 64) {
      const auto add = d + 64 <= dim_ ? add_features<4> : add_features<2>;
      add(keys, dim_, acc + d, values + d * RUN, weights_ + head * KEY_BLOCK * LANES);
    }
    __asm__ volatile("" ::: "memory");
  }

  const AttentionCall& call_;
  const HrStep& step_;
  const AttentionTask& task_;
  const int64_t group_, dim_, stride_;
  const S *keys_, *values_;
  const float scale_;
  // Of each KV head, except staged_.
  Gathered* gathered_;
  float* acc_;         // [LANES][dim], features interleaved
  float* scores_;      // [KEY_BLOCK][LANES]
  uint16_t* queries_;  // [dim / 2][LANES] pairs
  bf16* weights_;      // [LANES][KEY_BLOCK]
  bf16* interleaved_;  // [KEY_BLOCK / RUN][dim / 16] tiles of values
  bf16* staged_;       // [TILE_KEYS][dim], keys that had to be converted
};

template <class S, int LANES>
void stream(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task, const AttentionTask* next) {
  configure(call.group(), LANES);
  Stream<S, LANES> run(ws.thread_scratch[rank], call, task);
  run.run(next);
  run.finish(ws);
  _tile_loadconfig(&TILE_CONFIG);
}

}  // namespace

bool can_stream(const HrStep& step, int64_t group) {
  return step.dtype == HR_BF16 && step.cache_dtype != HR_F32 && step.head_dim % 32 == 0 && step.head_dim <= MAX_DIM &&
         group <= 16 && step.block_size % TILE_KEYS == 0;
}

void attend_stream(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task,
                   const AttentionTask* next) {
  const bool narrow = call.step.cache_dtype == HR_S8, few = call.group() <= 4;
  const auto run = narrow ? (few ? stream<int8_t, 4> : stream<int8_t, 16>) : (few ? stream<bf16, 4> : stream<bf16, 16>);
  run(ws, rank, call, task, next);
}

#else

bool can_stream(const HrStep&, int64_t) { return false; }
void attend_stream(Workspace&, int, const AttentionCall&, const AttentionTask&, const AttentionTask*) {}

#endif

}  // namespace headrace
