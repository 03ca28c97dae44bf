// Attention of one query token against a cache of int8, by AMX: the same pass as in stream.cpp, on bytes as they lie in
// the cache. Queries and weights are two bytes each, a high and a low one, so that only the cache is as coarse as int8:
// both are rows or columns of the same product, exact in int32.
//
// Values of four keys are interleaved to be the right operand, which leaves features in an order of their own.
#include "stream.h"
#include "stream_bytes.h"

namespace headrace {

#if defined(__AMX_INT8__)
namespace {

// Lines fetched after each piece of work of a KV head: together somewhat more than pass in a block of 64 keys.
constexpr int FETCH_SCORES = 4, FETCH_FOUR = 4, FETCH_WEIGHTS = 36, FETCH_SUMS = 10;

// LANES: 4, or 16 where a KV head has more than four query heads.
template <int LANES>
class Int8Stream : StreamBase<int8_t, LANES> {
  using Base = StreamBase<int8_t, LANES>;
  using Base::acc_, Base::dim_, Base::gathered_, Base::group_, Base::heads_, Base::stride_, Base::step_, Base::task_;
  // High and low bytes are rows and columns of one tile where there is room, else of two.
  static constexpr int64_t ROWS = std::min(2 * LANES, 16), PARTS = 2 * LANES / ROWS;

 public:
  // Tiles 0-3: sums; 4: queries; 5: keys or values; 6: scores; 7: weights.
  static void configure(int64_t) {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, ROWS * 4, 64, ROWS * 4, 64};
      uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, 16, 16, 16, ROWS};
    } config;
    __asm__ volatile("" ::"m"(config) : "memory");
    _tile_loadconfig(&config);
  }

  Int8Stream(Buffer& scratch, const AttentionCall& call, const AttentionTask& task, const AttentionTask* next)
      : Base(call, task, next) {
    const int64_t products = heads_ * 2 * LANES * KEY_BLOCK, floats = heads_ * (LANES + 2) * KEY_BLOCK + heads_ * LANES;
    const int64_t sums = 2 * LANES * DEPTH, bytes = heads_ * 2 * LANES * (dim_ + KEY_BLOCK) + heads_ * KEY_BLOCK * dim_;
    products_ = (int32_t*)this->clear(
        scratch.get<uint8_t>(Base::sums_bytes(heads_, dim_) + (products + sums + floats) * 4 + bytes));
    sums_ = products_ + products;
    scores_ = (float*)(sums_ + sums);
    key_scales_ = scores_ + heads_ * LANES * KEY_BLOCK;
    value_scales_ = key_scales_ + heads_ * KEY_BLOCK;
    query_scales_ = value_scales_ + heads_ * KEY_BLOCK;
    queries_ = (int8_t*)(query_scales_ + heads_ * LANES);
    weights_ = (uint8_t*)(queries_ + heads_ * 2 * LANES * dim_);
    interleaved_ = (int8_t*)(weights_ + heads_ * 2 * LANES * KEY_BLOCK);
    pack_queries();
  }

  void run() {
    for (int64_t first = task_.first_key; first < task_.last_key; first += KEY_BLOCK) {
      const KeyBlock block = this->find(first);
      for (int64_t key = 0; key < block.count; key += TILE_KEYS) {
        const int64_t slot = block.slots[key / TILE_KEYS];
        for (int64_t h = 0; h < heads_; ++h) multiply_keys(slot, h, key);
        gather_scales(slot, key, block.count - key);
        interleave(slot, key);
      }
      clear_scales(round_up(block.count, TILE_KEYS));
      for (int64_t h = 0; h < heads_; ++h) soften(block.count, h);
      for (int64_t h = 0; h < heads_; ++h) add_values(h);
    }
  }

  void finish(Workspace& ws) const {
    this->write(ws, [](const float* acc, float factor, int64_t dim, auto* out) { in_order(acc, factor, dim, out); });
  }

 private:
  // A row that is not finite gets a scale that is not.
  void pack_queries() {
    std::memset(queries_, 0, heads_ * 2 * LANES * dim_);
    std::memset(query_scales_, 0, heads_ * LANES * 4);
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t q = 0; q < group_; ++q) {
        const bf16* from = this->query(h, q);
        vf largest = {}, poison = {};
        for (int64_t d = 0; d < dim_; d += VL) {
          const vf part = load(from + d);
          largest = vmax(vabs(part), largest);
          poison += part - part;
        }
        const float magnitude = max_lanes(largest) + sum_lanes(poison);
        query_scales_[h * LANES + q] = magnitude / MOST_QUERY * this->scale_;
        pack_query(from, magnitude > 0.0f ? MOST_QUERY / magnitude : 0.0f, h, q);
      }
    }
  }

  void pack_query(const bf16* from, float inverse, int64_t head, int64_t q) {
    int8_t* to = queries_ + head * 2 * LANES * dim_;
    for (int64_t d = 0; d < dim_; d += VL) {
      const __m512i whole = _mm512_cvtps_epi32((__m512)(load(from + d) * inverse));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      alignas(16) int8_t bytes[2][VL];
      _mm_store_si128((__m128i*)bytes[0], _mm512_cvtepi32_epi8(high));
      _mm_store_si128((__m128i*)bytes[1], _mm512_cvtepi32_epi8(whole));
      for (int64_t part = 0; part < 2; ++part) {
        for (int64_t i = 0; i < VL; i += 4) std::memcpy(query_tile(to, d + i, part * LANES + q), bytes[part] + i, 4);
      }
    }
  }

  // Where four features from d on of a column lie: [dim / 64][PARTS][16][ROWS][4].
  int8_t* query_tile(int8_t* of_head, int64_t d, int64_t column) const {
    const int64_t part = d / DEPTH * PARTS + column / ROWS;
    return of_head + ((part * 16 + d % DEPTH / 4) * ROWS + column % ROWS) * 4;
  }

  // Scores of 16 keys, high and low: [PARTS][KEY_BLOCK][ROWS] of each KV head.
  void multiply_keys(int64_t slot, int64_t head, int64_t key) {
    const int8_t* query = queries_ + head * 2 * LANES * dim_;
    const int8_t* keys = this->keys_ + this->at(slot, head);
    for (int64_t part = 0; part < PARTS; ++part) {
      _tile_zero(6);
      for (int64_t d = 0; d < dim_; d += DEPTH) {
        _tile_loadd(4, query + (d / DEPTH * PARTS + part) * DEPTH * ROWS, ROWS * 4);
        _tile_loadd(5, keys + d, stride_);
        _tile_dpbssd(6, 5, 4);
      }
      _tile_stored(6, products_ + ((head * PARTS + part) * KEY_BLOCK + key) * ROWS, ROWS * 4);
    }
    __asm__ volatile("" ::: "memory");
    this->fetch(FETCH_SCORES);
  }

  // Scales of 16 keys, zero from `count` on: unwritten slots may hold anything.
  void gather_scales(int64_t slot, int64_t key, int64_t count) {
    const int64_t heads = step_.num_kv_heads, from = slot * heads + task_.kv_head;
    const __mmask16 valid = count < TILE_KEYS ? __mmask16((1 << count) - 1) : __mmask16(0xffff);
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i index = (__m512i)(lanes * int32_t(heads));
    for (int64_t h = 0; h < heads_; ++h) {
      const auto gather = [&](const float* scales) {
        return (vf)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), valid, index, scales + from + h, 4);
      };
      store(key_scales_ + h * KEY_BLOCK + key, gather(step_.key_scales[this->call_.layer]));
      store(value_scales_ + h * KEY_BLOCK + key, gather(step_.value_scales[this->call_.layer]));
    }
    for (int64_t line = 0; line < TILE_KEYS * heads * 4; line += LINE) {  // most likely the next ones
      __builtin_prefetch((const char*)(step_.key_scales[this->call_.layer] + (slot + TILE_KEYS) * heads) + line);
      __builtin_prefetch((const char*)(step_.value_scales[this->call_.layer] + (slot + TILE_KEYS) * heads) + line);
    }
  }

  // What an earlier block or call left behind must not count among the largest of this one.
  void clear_scales(int64_t key) {
    for (; key < KEY_BLOCK; key += TILE_KEYS) {
      for (int64_t h = 0; h < heads_; ++h) {
        store(key_scales_ + h * KEY_BLOCK + key, vf{});
        store(value_scales_ + h * KEY_BLOCK + key, vf{});
      }
    }
  }

  // Values of 16 keys -> tiles.
  void interleave(int64_t slot, int64_t key) {
    const int8_t* first = this->values_ + this->at(slot, 0);
    for (int64_t i = 0; i < TILE_KEYS; i += 4) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t d = 0; d < dim_; d += DEPTH) {
          const int8_t* rows[4];
          for (int64_t j = 0; j < 4; ++j) rows[j] = first + (i + j) * stride_ + h * dim_ + d;
          interleave_four(rows, interleaved_ + (h * dim_ + d) * KEY_BLOCK + (key + i) * WIDTH);
        }
        this->fetch(FETCH_FOUR);
      }
    }
  }

  // Scores -> weights. What a step of the sums is worth replaces the scales of keys.
  void soften(int64_t count, int64_t head) {
    float *scores = scores_ + head * LANES * KEY_BLOCK, *key_scales = key_scales_ + head * KEY_BLOCK;
    join_scores(head, key_scales, scores);
    this->fetch(FETCH_WEIGHTS / 2);
    Gathered& gathered = gathered_[head];
    const vf scale = spread_heads(query_scales_ + head * LANES), peak = find_peak<LANES>(scores, count) * scale;
    this->follow(head, peak);
    const float* value_scales = value_scales_ + head * KEY_BLOCK;
    // No weight is larger; where a scale is not finite, neither is this.
    const vf most = vmax(splat(1e-30f), vexp2_fast(peak - gathered.top) * largest_scale(value_scales));
    const vf step = most * (1.0f / MOST_WEIGHT);
    const Weigher<LANES> by = {scale, gathered.top, 1.0f / step, value_scales};
    gathered.total += make_byte_weights<LANES>(scores, by, weights_ + head * 2 * LANES * KEY_BLOCK);
    store(key_scales, step);
    this->fetch(FETCH_WEIGHTS / 2);
  }

  static vf spread_heads(const float* each) {
    if constexpr (LANES == 16) return load(each);
    return (vf)_mm512_broadcast_f32x4(_mm_loadu_ps(each));
  }

  static float largest_scale(const float* scales) {
    vf largest = {}, poison = {};
    for (int64_t i = 0; i < KEY_BLOCK; i += VL) {
      const vf some = load(scales + i);
      largest = vmax(some, largest);
      poison += some - some;
    }
    return max_lanes(largest) + sum_lanes(poison);
  }

  // High and low -> float, times the keys' scales: [KEY_BLOCK][LANES].
  void join_scores(int64_t head, const float* key_scales, float* scores) {
    const int32_t* from = products_ + head * 2 * LANES * KEY_BLOCK;
    for (int i = 0; i < KEY_BLOCK * LANES / VL; ++i) {
      __m512i high, low;
      if constexpr (LANES == 4) {
        const __m512i a = _mm512_loadu_si512(from + 2 * i * VL), b = _mm512_loadu_si512(from + (2 * i + 1) * VL);
        high = _mm512_shuffle_i32x4(a, b, 0x88);
        low = _mm512_shuffle_i32x4(a, b, 0xdd);
      } else {
        high = _mm512_loadu_si512(from + i * VL);
        low = _mm512_loadu_si512(from + KEY_BLOCK * LANES + i * VL);
      }
      const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
      store(scores + i * VL, (vf)_mm512_cvtepi32_ps(whole) * spread<LANES>(key_scales, i));
    }
  }

  // sums += weights * values, 64 features at a time.
  void add_values(int64_t head) {
    const uint8_t* weights = weights_ + head * 2 * LANES * KEY_BLOCK;
    __asm__ volatile("" ::: "memory");
    for (int64_t d = 0; d < dim_; d += DEPTH) {
      const int8_t* values = interleaved_ + (head * dim_ + d) * KEY_BLOCK;
      for (int64_t part = 0; part < PARTS; ++part) multiply_values(values, weights + part * ROWS * KEY_BLOCK, part);
      __asm__ volatile("" ::: "memory");
      for (int64_t q = 0; q < group_; ++q) {
        const float step = key_scales_[head * KEY_BLOCK + q];
        float* acc = acc_ + (head * LANES + q) * dim_ + d;
        const int32_t *high = sums_ + q * DEPTH, *low = sums_ + (LANES + q) * DEPTH;
        for (int64_t i = 0; i < DEPTH; i += VL) {
          const vi whole = (load_as<vi>(high + i) << 8) + load_as<vi>(low + i);
          store(acc + i, load(acc + i) + __builtin_convertvector(whole, vf) * step);
        }
      }
    }
    this->fetch(FETCH_SUMS);
  }

  void multiply_values(const int8_t* values, const uint8_t* weights, int64_t part) {
    constexpr int64_t TILE = KEY_BLOCK * WIDTH;
    int32_t* to = sums_ + part * ROWS * DEPTH;
    _tile_loadd(7, weights, KEY_BLOCK);
    _tile_zero(0);
    _tile_loadd(5, values, 64);
    _tile_dpbusd(0, 7, 5);
    _tile_zero(1);
    _tile_loadd(5, values + TILE, 64);
    _tile_dpbusd(1, 7, 5);
    _tile_zero(2);
    _tile_loadd(5, values + 2 * TILE, 64);
    _tile_dpbusd(2, 7, 5);
    _tile_zero(3);
    _tile_loadd(5, values + 3 * TILE, 64);
    _tile_dpbusd(3, 7, 5);
    _tile_stored(0, to, DEPTH * 4);
    _tile_stored(1, to + WIDTH, DEPTH * 4);
    _tile_stored(2, to + 2 * WIDTH, DEPTH * 4);
    _tile_stored(3, to + 3 * WIDTH, DEPTH * 4);
  }

  // Of each KV head, except sums_.
  int32_t* products_;    // [PARTS][KEY_BLOCK][ROWS]
  int32_t* sums_;        // [2 * LANES][64]
  float* scores_;        // [KEY_BLOCK][LANES]
  float* key_scales_;    // [KEY_BLOCK]; once used, what a step of each query head's sums is worth
  float* value_scales_;  // [KEY_BLOCK]
  float* query_scales_;  // [LANES]
  int8_t* queries_;      // tiles, see query_tile
  uint8_t* weights_;     // [2 * LANES][KEY_BLOCK]
  int8_t* interleaved_;  // [dim / 16] tiles of values
};

}  // namespace

void attend_int8_stream(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task,
                        const AttentionTask* next) {
  (call.group() <= 4 ? stream<Int8Stream<4>> : stream<Int8Stream<16>>)(ws, rank, call, task, next);
}

#endif

}  // namespace headrace
