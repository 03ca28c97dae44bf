// Attention of several query tokens of one row: tiles of (tokens x query heads) against blocks of keys, both products on
// the matrix kernels of tile.h, softmax online in between (FlashAttention-2, Dao 2023). Keys and values are packed block
// by block as they are needed; nothing the size of the context is ever copied.
#include <limits>

#include "attention.h"

namespace headrace {
namespace {

constexpr int KEY_PANELS = KEY_BLOCK / PANEL;

// bf16 caches multiply in bf16 where the CPU can; everything else in float32.
template <class T>
struct Element {
  using Type = float;
};
#if defined(__AVX512BF16__)
template <>
struct Element<bf16> {
  using Type = bf16;
};
#endif

template <class E>
constexpr Product product_for() {
  return sizeof(E) == 2 ? Product::BF16 : Product::F32;
}

// Up to VL 32-bit pairs of bf16, zero past n elements.
inline vu load_pairs(const bf16* p, int64_t n) {
  if (n >= 2 * VL) return load_as<vu>(p);
  uint16_t lanes[2 * VL] = {};
  if (n > 0) std::memcpy(lanes, p, n * 2);
  return load_as<vu>(lanes);
}

template <class T>
inline vf load_from(const T* row, int64_t at, int64_t dim) {
  return at < dim ? load_upto(row + at, dim - at) : vf{};
}

// VL keys -> their lanes of a panel's steps.
template <class T>
void pack_keys(const T* const* rows, int64_t dim, int64_t depth, float* panel) {
  for (int64_t d = 0; d < depth; d += VL) {
    vu block[VL];
    for (int j = 0; j < VL; ++j) block[j] = (vu)load_from(rows[j], d, dim);
    transpose(block);
    for (int i = 0; i < VL; ++i) store_as(panel + (d + i) * PANEL, block[i]);
  }
}
inline void pack_keys(const bf16* const* rows, int64_t dim, int64_t depth, bf16* panel) {
  for (int64_t d = 0; d < depth; d += 2 * VL) {
    vu block[VL];
    for (int j = 0; j < VL; ++j) block[j] = load_pairs(rows[j] + d, dim - d);
    transpose(block);
    for (int i = 0; i < VL; ++i) store_as(panel + (d + 2 * i) * PANEL, block[i]);
  }
}

// All keys of a block, 64 bytes of features from `at` -> one panel of float32, or two of bf16.
template <class T>
void pack_values(const T* const* rows, int64_t dim, int64_t at, float* panel) {
  for (int64_t j = 0; j < KEY_BLOCK; ++j) {
    for (int v = 0; v < PANEL; v += VL) store(panel + j * PANEL + v, load_from(rows[j], at + v, dim));
  }
}
#if defined(__AVX512BF16__)
typedef uint16_t Halves __attribute__((vector_size(64)));

template <int... I>
inline Halves interleave_low(Halves a, Halves b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I % 2 * 32 + I / 2)...);
}
template <int... I>
inline Halves interleave_high(Halves a, Halves b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I % 2 * 32 + I / 2 + 16)...);
}

// A panel pairs the values of two consecutive keys.
inline void pack_values(const bf16* const* rows, int64_t dim, int64_t at, bf16* panel) {
  const auto lanes = std::make_integer_sequence<int, 32>{};
  for (int64_t j = 0; j < KEY_BLOCK; j += 2) {
    const auto even = (Halves)load_pairs(rows[j] + at, dim - at), odd = (Halves)load_pairs(rows[j + 1] + at, dim - at);
    store_as(panel + j * PANEL, interleave_low(even, odd, lanes));
    store_as(panel + (KEY_BLOCK + j) * PANEL, interleave_high(even, odd, lanes));
  }
}
#endif

template <class E>
struct Tile {
  int64_t rows, dim, depth, width;  // depth: dim padded for the key product; width: for the value product
  E* query;                         // [rows][depth]
  E* keys;                          // KEY_PANELS panels
  E* values;                        // width / PANEL panels
  float* scores;                    // [rows][KEY_BLOCK]
  E* weights;                       // [rows][KEY_BLOCK]
  float* acc;                       // [rows][width]
  float* top;
  float* total;
};

template <class E>
Tile<E> make_tile(Buffer& scratch, int64_t rows, int64_t dim) {
  Tile<E> t = {rows, dim, round_up(dim, 32), round_up(dim, 32)};
  const int64_t padded = round_up(rows, TILE_ROWS);
  const int64_t elements = padded * t.depth + KEY_BLOCK * t.depth + KEY_BLOCK * t.width + padded * KEY_BLOCK;
  const int64_t floats = padded * (KEY_BLOCK + t.width + 2);
  auto* bytes = scratch.get<uint8_t>(elements * int64_t(sizeof(E)) + floats * 4);
  // Every part is a multiple of 64 bytes.
  t.query = (E*)bytes;
  t.keys = t.query + padded * t.depth;
  t.values = t.keys + KEY_BLOCK * t.depth;
  t.weights = t.values + KEY_BLOCK * t.width;
  t.scores = (float*)(t.weights + padded * KEY_BLOCK);
  t.acc = t.scores + padded * KEY_BLOCK;
  t.top = t.acc + padded * t.width;
  t.total = t.top + padded;
  std::memset(t.acc, 0, rows * t.width * 4);
  for (int64_t r = 0; r < rows; ++r) {
    t.top[r] = -std::numeric_limits<float>::infinity();
    t.total[r] = 0.0f;
  }
  return t;
}

template <class T, class E>
void load_query(const Tile<E>& t, int64_t row, const T* query) {
  E* to = t.query + row * t.depth;
  for (int64_t d = 0; d < t.depth; d += VL) store(to + d, load_from(query, d, t.dim));
}

// Softmax to the base that is cheaper: e where results stay float32, 2 where they are rounded to bf16 anyway.
template <class E>
struct Softmax;
template <>
struct Softmax<float> {
  static constexpr float UNIT = 1.0f;
  static vf power(vf x) { return vexp(x); }
  static float power(float x) { return std::exp(x); }
};
template <>
struct Softmax<bf16> {
  static constexpr float UNIT = LOG2_E;
  static vf power(vf x) { return vexp2_coarse(vmax(x, splat(-125.0f))); }
  static float power(float x) { return std::exp2(x); }
};

// Scores of one row, of which the first `visible` may be seen -> weights; rescales what was accumulated before.
template <class E>
void soften_row(const Tile<E>& t, int64_t r, int64_t visible, float scale) {
  float* scores = t.scores + r * KEY_BLOCK;
  E* weights = t.weights + r * KEY_BLOCK;
  if (visible <= 0) {
    std::memset(weights, 0, KEY_BLOCK * sizeof(E));
    return;
  }
  vf part[KEY_BLOCK / VL];
  vf top = splat(t.top[r]);
  for (int i = 0; i < KEY_BLOCK / VL; ++i) {
    part[i] = load(scores + i * VL) * scale;
    if (visible < (i + 1) * VL) {
      for (int lane = 0; lane < VL; ++lane) {
        if (i * VL + lane >= visible) part[i][lane] = -std::numeric_limits<float>::infinity();
      }
    }
    top = vmax(part[i], top);
  }
  const float highest = max_lanes(top), before = t.top[r];
  vf sum = {};
  for (int i = 0; i < KEY_BLOCK / VL; ++i) {
    const vf weight = Softmax<E>::power(part[i] - highest);
    store(weights + i * VL, weight);
    sum += weight;
  }
  if (highest > before) {
    const float rescale = Softmax<E>::power(before - highest);
    t.total[r] *= rescale;
    float* acc = t.acc + r * t.width;
    for (int64_t d = 0; d < t.width; d += VL) store(acc + d, load(acc + d) * rescale);
    t.top[r] = highest;
  }
  t.total[r] += sum_lanes(sum);
}

template <class T, class E>
void pack_block(const Tile<E>& t, const T* const* keys, const T* const* values) {
  for (int64_t j = 0; j < KEY_BLOCK; j += VL) {
    pack_keys(keys + j, t.dim, t.depth, t.keys + j / PANEL * PANEL * t.depth + j % PANEL * (4 / sizeof(E)));
  }
  for (int64_t d = 0; d < t.width; d += 64 / sizeof(E)) pack_values(values, t.dim, d, t.values + d * KEY_BLOCK);
}

template <class E>
void multiply_keys(const Tile<E>& t) {
  TileJob job = {};
  job.a = (const uint8_t*)t.query;
  job.lda = t.depth * sizeof(E);
  job.steps = t.depth * sizeof(E) / 4;
  job.num_panels = KEY_PANELS;
  for (int p = 0; p < KEY_PANELS; ++p) job.panels[p] = (const uint8_t*)(t.keys + p * PANEL * t.depth);
  job.c = t.scores;
  job.ldc = KEY_BLOCK;
  job.rows = t.rows;
  multiply_tile(product_for<E>(), job);
}

template <class E>
void multiply_values(const Tile<E>& t) {
  TileJob job = {};
  job.a = (const uint8_t*)t.weights;
  job.lda = KEY_BLOCK * sizeof(E);
  job.steps = KEY_BLOCK * sizeof(E) / 4;
  job.ldc = t.width;
  job.rows = t.rows;
  job.accumulate = true;
  const int64_t panels = t.width / PANEL;
  for (int64_t first = 0; first < panels; first += TILE_PANELS) {
    job.num_panels = int(panels - first < TILE_PANELS ? panels - first : TILE_PANELS);
    for (int p = 0; p < job.num_panels; ++p) job.panels[p] = (const uint8_t*)(t.values + (first + p) * PANEL * KEY_BLOCK);
    job.c = t.acc + first * PANEL;
    multiply_tile(product_for<E>(), job);
  }
}

}  // namespace

template <class T>
void attend_prefill(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task) {
  using E = typename Element<T>::Type;
  const HrStep& step = call.step;
  const int64_t group = call.group(), dim = step.head_dim, first_head = task.kv_head * group;
  const int64_t token = step.query_start[task.row] + task.first_token;
  const int64_t first_position = task.last_key - task.num_tokens;
  const float scale = Softmax<E>::UNIT / std::sqrt(float(dim));
  const Tile<E> t = make_tile<E>(ws.thread_scratch[rank], task.num_tokens * group, dim);
  // Row r of the tile: token r / group, query head r % group.
  for (int64_t r = 0; r < t.rows; ++r) {
    load_query(t, r, (const T*)call.query + (token + r / group) * call.query_ld + (first_head + r % group) * dim);
  }
  // Stands in for keys past the end: their slots may hold anything.
  T* zeros = ws.zeros.get<T>(0);
  Slots slots(step, task.row, 0, task.kv_head);
  for (int64_t first = 0; first < task.last_key; first += KEY_BLOCK) {
    const T *keys[KEY_BLOCK], *values[KEY_BLOCK];
    for (int64_t j = 0; j < KEY_BLOCK; ++j) {
      if (first + j >= task.last_key) {
        keys[j] = values[j] = zeros;
        continue;
      }
      const int64_t offset = slots.next();
      keys[j] = (const T*)step.keys[call.layer] + offset;
      values[j] = (const T*)step.values[call.layer] + offset;
    }
    pack_block(t, keys, values);
    multiply_keys(t);
    for (int64_t r = 0; r < t.rows; ++r) soften_row(t, r, first_position + r / group + 1 - first, scale);
    multiply_values(t);
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    T* out = (T*)call.out + (token + r / group) * call.out_ld + (first_head + r % group) * dim;
    const float factor = 1.0f / t.total[r];
    for (int64_t d = 0; d < dim; d += VL) store_upto(out + d, load(t.acc + r * t.width + d) * factor, dim - d);
  }
}

template void attend_prefill<float>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_prefill<bf16>(Workspace&, int, const AttentionCall&, const AttentionTask&);

}  // namespace headrace
