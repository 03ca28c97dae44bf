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

// 64 keys of a sequence, one KV head's share of which is worked on at a time.
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
    const int64_t halves = heads * dim_ * LANES + KEY_BLOCK * (LANES + 3 * dim_);
    const int64_t floats = heads * LANES * dim_ + 2 * KEY_BLOCK * LANES;
    auto* bytes = scratch.get<uint8_t>(halves * 2 + floats * 4 + heads * int64_t(sizeof(Gathered)));
    gathered_ = (Gathered*)bytes;
    acc_ = (float*)(gathered_ + heads);
    scores_ = acc_ + heads * LANES * dim_;
    queries_ = (uint16_t*)(scores_ + 2 * KEY_BLOCK * LANES);
    weights_ = (bf16*)(queries_ + heads * dim_ * LANES);
    interleaved_ = weights_ + KEY_BLOCK * LANES;
    staged_ = interleaved_ + 2 * KEY_BLOCK * dim_;
    std::memset(acc_, 0, heads * LANES * dim_ * 4);
    for (int64_t h = 0; h < heads; ++h) gathered_[h] = {splat(NOTHING), vf{}};
    pack_queries();
  }

  // Two units are under way at any time, a unit being a KV head's share of a block: the matrix unit makes the scores of
  // the next while vectors turn this one's into weights. Tiles are loaded long after they were stored.
  void run(const AttentionTask* next) {
    const int64_t heads = task_.num_kv_heads;
    const int64_t units = ceil_div(task_.last_key - task_.first_key, KEY_BLOCK) * heads;
    KeyBlock blocks[3];  // of the unit before, this, and the next; a ring
    const auto block_of = [&](int64_t unit) -> KeyBlock& { return blocks[unit / heads % 3]; };
    blocks[0] = find(task_, task_.first_key);
    begin(block_of(0), 0, 0, nullptr, 0);
    for (int64_t unit = 0; unit <= units; ++unit) {
      const bool more = unit + 1 < units;
      if (unit > 0) add_values(block_of(unit - 1), (unit - 1) % heads, (unit - 1) & 1);
      if (more) {
        const int64_t first = task_.first_key + (unit + 1) / heads * KEY_BLOCK, head = (unit + 1) % heads;
        if (head == 0) block_of(unit + 1) = find(task_, first);
        fetch(first + KEY_BLOCK, next);
        begin(block_of(unit + 1), head, (unit + 1) & 1, ahead_.count ? &ahead_ : nullptr, ahead_head_ + head);
      }
      if (unit < units) soften(block_of(unit), unit % heads, unit & 1);
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
    const int32_t* table = step_.block_tables + task.row * step_.table_width;
    for (int64_t j = 0; j < block.count; j += TILE_KEYS) {
      const int64_t at = first + j;
      block.slots[j / TILE_KEYS] = table[at / step_.block_size] * step_.block_size + at % step_.block_size;
    }
    return block;
  }

  // What to fetch into the cache while working on the block before `first`.
  void fetch(int64_t first, const AttentionTask* next) {
    if (first == ahead_first_) return;
    ahead_first_ = first;
    ahead_.count = 0;
    if (first < task_.last_key) {
      ahead_ = find(task_, first);
      ahead_head_ = task_.kv_head;
    } else if (next && next->kind == task_.kind && next->num_kv_heads == task_.num_kv_heads) {
      ahead_ = find(*next, next->first_key);
      ahead_head_ = next->kv_head;
    }
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

  // Scores and interleaved values of a unit.
  void begin(const KeyBlock& block, int64_t head, int64_t turn, const KeyBlock* ahead, int64_t ahead_head) {
    multiply_keys(block, head, scores_ + turn * KEY_BLOCK * LANES);
    bf16* to = interleaved_ + turn * KEY_BLOCK * dim_;
    const int64_t column = (task_.kv_head + head) * dim_;
    for (int64_t j = 0; j < KEY_BLOCK; j += 2) {
      if (j >= block.count && j % RUN == 0) break;
      if (ahead && j < ahead->count) {
        const int64_t at = (ahead->slots[j / TILE_KEYS] + j % TILE_KEYS) * stride_ + ahead_head * dim_;
        fetch_row(keys_ + at);
        fetch_row(values_ + at);
        fetch_row(keys_ + at + stride_);
        fetch_row(values_ + at + stride_);
      }
      const S* row = values_ + (block.slots[j / TILE_KEYS] + j % TILE_KEYS) * stride_ + column;
      bf16* pair = to + j / RUN * RUN * dim_ + j % RUN * VL;
      for (int64_t d = 0; d < dim_; d += 32) {
        // Slots past the end may hold anything.
        const vu even = j < block.count ? load_32(row + d) : vu{};
        const vu odd = j + 1 < block.count ? load_32(row + stride_ + d) : vu{};
        store_as(pair + d * RUN, interleaved(even, odd, std::false_type{}));
        store_as(pair + (d + VL) * RUN, interleaved(even, odd, std::true_type{}));
      }
    }
  }

  void fetch_row(const S* row) const {
    for (int64_t d = 0; d < dim_; d += 64 / int64_t(sizeof(S))) __builtin_prefetch(row + d, 0, 2);
  }

  void multiply_keys(const KeyBlock& block, int64_t head, float* scores) {
    const uint16_t* query = queries_ + head * dim_ * LANES;
    const int64_t column = (task_.kv_head + head) * dim_;
    for (int64_t j = 0; j < block.count; j += TILE_KEYS) {
      const S* rows = keys_ + block.slots[j / TILE_KEYS] * stride_ + column;
      const bf16* keys = (const bf16*)rows;
      int64_t ld = stride_;
      if constexpr (sizeof(S) == 1) {
        for (int64_t i = 0; i < TILE_KEYS; ++i) {
          bf16* to = staged_ + (j + i) * dim_;
          for (int64_t d = 0; d < dim_; d += 32) store_as(to + d, load_32(rows + i * stride_ + d));
        }
        keys = staged_ + j * dim_;
        ld = dim_;
        __asm__ volatile("" ::: "memory");
      }
      _tile_zero(6);
      for (int64_t d = 0; d < dim_; d += 32) {
        _tile_loadd(4, query + d * LANES, LANES * 4);
        _tile_loadd(5, keys + d, ld * 2);
        _tile_dpbf16ps(6, 5, 4);
      }
      _tile_stored(6, scores + j * LANES, LANES * 4);
    }
    __asm__ volatile("" ::: "memory");
  }

  void gather_scales(const KeyBlock& block, int64_t head, const float* from, float* to) const {
    for (int64_t j = 0; j < KEY_BLOCK; ++j) {
      const int64_t slot = block.slots[j / TILE_KEYS] + j % TILE_KEYS;
      to[j] = j < block.count ? from[slot * step_.num_kv_heads + task_.kv_head + head] : 0.0f;
    }
  }

  // Scores -> weights.
  void soften(const KeyBlock& block, int64_t head, int64_t turn) {
    float* scores = scores_ + turn * KEY_BLOCK * LANES;
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
    gathered.total += make_weights<LANES>(scores, scale_, gathered.top, SCALED ? value_scales : nullptr, weights_);
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
  void add_values(const KeyBlock& block, int64_t head, int64_t turn) {
    float* acc = acc_ + head * LANES * dim_;
    const bf16* values = interleaved_ + turn * KEY_BLOCK * dim_;
    __asm__ volatile("" ::: "memory");
    for (int64_t d = 0; d < dim_; d += 64) {
      const auto add = d + 64 <= dim_ ? add_features<4> : add_features<2>;
      add(block.count, dim_, acc + d, values + d * RUN, weights_);
    }
    __asm__ volatile("" ::: "memory");
  }

  const AttentionCall& call_;
  const HrStep& step_;
  const AttentionTask& task_;
  const int64_t group_, dim_, stride_;
  const S *keys_, *values_;
  const float scale_;
  Gathered* gathered_;    // [KV heads]
  float* acc_;            // [KV heads][LANES][dim], features interleaved
  float* scores_;         // two of [KEY_BLOCK][LANES]
  uint16_t* queries_;     // [KV heads][dim / 2][LANES] pairs
  bf16* weights_;         // [LANES][KEY_BLOCK]
  bf16* interleaved_;     // two of [KEY_BLOCK / RUN][dim / 16] tiles of values
  bf16* staged_;          // [KEY_BLOCK][dim], keys that had to be converted
  KeyBlock ahead_ = {};
  int64_t ahead_first_ = -1, ahead_head_ = 0;
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
  return step.dtype == HR_BF16 && step.cache_dtype != HR_F32 && step.head_dim % 32 == 0 && group <= 16 &&
         step.block_size % TILE_KEYS == 0;
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
