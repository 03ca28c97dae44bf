// Attention of one query token against a cache of bf16, by AMX: a pass over keys and values in the order they lie in
// memory, all KV heads of a token together. Softmax is online, as in tiled.cpp.
//
// Scores are [keys][query heads]: keys are the left operand as they lie in the cache. The sums are [query heads]
// [features]: the values of two keys are interleaved to be the right one, which takes a fifth of what transposing them
// would. That order of features is undone at the end.
#include "stream.h"
#include "stream_tiles.h"

namespace headrace {

#if defined(__AMX_BF16__)
namespace {

// Lines fetched after each piece of work of a KV head: together somewhat more than pass in a block of 64 keys.
constexpr int FETCH_SCORES = 8, FETCH_PAIR = 2, FETCH_WEIGHTS = 26, FETCH_SUMS = 18;

template <int LANES>
class Stream : StreamBase<bf16, LANES> {
  using Base = StreamBase<bf16, LANES>;
  using Base::acc_, Base::dim_, Base::gathered_, Base::group_, Base::heads_, Base::stride_, Base::task_;

 public:
  static void configure(int64_t group) { headrace::configure(group, LANES); }

  Stream(Buffer& scratch, const AttentionCall& call, const AttentionTask& task, const AttentionTask* next)
      : Base(call, task, next) {
    const int64_t halves = heads_ * (dim_ * LANES + KEY_BLOCK * (LANES + dim_)), floats = heads_ * LANES * KEY_BLOCK;
    scores_ = (float*)this->clear(
        scratch.get<uint8_t>(Base::sums_bytes(heads_, dim_) + halves * 2 + floats * 4));
    queries_ = (uint16_t*)(scores_ + floats);
    weights_ = (bf16*)(queries_ + heads_ * dim_ * LANES);
    interleaved_ = weights_ + heads_ * KEY_BLOCK * LANES;
    pack_queries();
  }

  // Every 16 keys and their values are read once, in the order of memory. Tiles are loaded long after vectors stored
  // them.
  void run() {
    for (int64_t first = task_.first_key; first < task_.last_key; first += KEY_BLOCK) {
      const KeyBlock block = this->find(first);
      for (int64_t key = 0; key < round_up(block.count, RUN); key += TILE_KEYS) {
        if (key < block.count) {
          for (int64_t h = 0; h < heads_; ++h) multiply_keys(block.slots[key / TILE_KEYS], h, key);
        }
        interleave(block, key);
      }
      for (int64_t h = 0; h < heads_; ++h) soften(block, h);
      for (int64_t h = 0; h < heads_; ++h) add_values(block.count, h);
    }
  }

  void finish(Workspace& ws) const {
    this->write(ws, [](const float* acc, float factor, int64_t dim, auto* out) { in_order(acc, factor, dim, out); });
  }

 private:
  void pack_queries() {
    std::memset(queries_, 0, heads_ * dim_ * LANES * 2);
    for (int64_t h = 0; h < heads_; ++h) {
      auto* to = (uint32_t*)(queries_ + h * dim_ * LANES);
      for (int64_t q = 0; q < group_; ++q) {
        const bf16* from = this->query(h, q);
        for (int64_t d = 0; d < dim_; d += 2) to[d / 2 * LANES + q] = load_as<uint32_t>(from + d);
      }
    }
  }

  // Values of 16 keys -> tiles.
  void interleave(const KeyBlock& block, int64_t key) {
    const int64_t keys = std::clamp<int64_t>(block.count - key, 0, TILE_KEYS);
    const bf16* rows = this->values_ + this->at(keys > 0 ? block.slots[key / TILE_KEYS] : 0, 0);
    bf16* tiles = interleaved_ + key / RUN * RUN * dim_ + key % RUN * VL;
    static constexpr bf16 zeros[MAX_DIM] = {};  // for slots past the end, which may hold anything
    for (int64_t i = 0; i < TILE_KEYS; i += 2) {
      for (int64_t h = 0; h < heads_; ++h) {
        const bf16* row = rows + i * stride_ + h * dim_;
        interleave_pair(i < keys ? row : zeros, i + 1 < keys ? row + stride_ : zeros,
                        tiles + h * KEY_BLOCK * dim_ + i * VL);
        this->fetch(FETCH_PAIR);
      }
    }
  }

  // Two keys' values -> their row of every tile.
  void interleave_pair(const bf16* even, const bf16* odd, bf16* to) const {
    for (int64_t d = 0; d < dim_; d += 32) {
      const vu a = load_as<vu>(even + d), b = load_as<vu>(odd + d);
      store_as(to + d * RUN, interleaved(a, b, std::false_type{}));
      store_as(to + (d + VL) * RUN, interleaved(a, b, std::true_type{}));
    }
  }

  // Scores of 16 keys.
  void multiply_keys(int64_t slot, int64_t head, int64_t key) {
    const uint16_t* query = queries_ + head * dim_ * LANES;
    const bf16* keys = this->keys_ + this->at(slot, head);
    _tile_zero(6);
    for (int64_t d = 0; d < dim_; d += 32) {
      _tile_loadd(4, query + d * LANES, LANES * 4);
      _tile_loadd(5, keys + d, stride_ * 2);
      _tile_dpbf16ps(6, 5, 4);
    }
    _tile_stored(6, scores_ + (head * KEY_BLOCK + key) * LANES, LANES * 4);
    __asm__ volatile("" ::: "memory");
    this->fetch(FETCH_SCORES);
  }

  // Scores -> weights.
  void soften(const KeyBlock& block, int64_t head) {
    float* scores = scores_ + head * KEY_BLOCK * LANES;
    const vf scale = splat(this->scale_), peak = find_peak<LANES>(scores, block.count) * scale;
    this->follow(head, peak);
    this->fetch(FETCH_WEIGHTS / 2);
    bf16* weights = weights_ + head * KEY_BLOCK * LANES;
    gathered_[head].total += make_weights<LANES>(scores, scale, gathered_[head].top, weights);
    this->fetch(FETCH_WEIGHTS / 2);
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
    this->fetch(FETCH_SUMS);
  }

  // Of each KV head.
  float* scores_;      // [KEY_BLOCK][LANES]
  uint16_t* queries_;  // [dim / 2][LANES] pairs
  bf16* weights_;      // [LANES][KEY_BLOCK]
  bf16* interleaved_;  // [KEY_BLOCK / RUN][dim / 16] tiles of values
};

}  // namespace

bool can_stream(const HrStep& step, int64_t group) {
  const int64_t depth = step.cache_dtype == HR_S8 ? 64 : 32;  // features that one product adds up
  return step.dtype == HR_BF16 && step.cache_dtype != HR_F32 && step.head_dim % depth == 0 &&
         step.head_dim <= MAX_DIM && group <= 16 && step.block_size % TILE_KEYS == 0;
}

void attend_stream(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task,
                   const AttentionTask* next) {
  if (call.step.cache_dtype == HR_S8) return attend_int8_stream(ws, rank, call, task, next);
  (call.group() <= 4 ? stream<Stream<4>> : stream<Stream<16>>)(ws, rank, call, task, next);
}

#else

bool can_stream(const HrStep&, int64_t) { return false; }
void attend_stream(Workspace&, int, const AttentionCall&, const AttentionTask&, const AttentionTask*) {}

#endif

}  // namespace headrace
