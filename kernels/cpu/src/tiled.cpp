// Attention on the matrix kernels of tile.h, softmax online in between (FlashAttention-2, Dao 2023): tiles of query rows
// (new tokens of a sequence times the query heads of a KV head) against blocks of keys. Nothing the size of the context
// is ever copied.
//
// Everything is transposed: scores are [keys][query rows], sums [features][query rows]. So a query row is a lane of a
// vector, its maximum and sum take no operation across lanes, and keys are multiplied as they lie in the cache.
//
// A query row's result depends on its own keys alone, bit by bit: blocks and segments begin at fixed positions, and no
// lane's arithmetic looks at another lane. So it is the same in a decode and in a prefill, however that was cut.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "operands.h"

namespace headrace {
namespace {

// Below every score: a maximum of nothing. Finite, so that differences are.
constexpr float FLOOR = -1e30f;

// bf16 models multiply in bf16 where the CPU can; everything else in float32.
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

// Softmax to the base that is cheaper: e where results stay float32, 2 where they are rounded to bf16 anyway. A
// reference that is at most SLACK below the true maximum is kept: exponentials grow to 256 at most, and sums are rarely
// rescaled.
template <class E>
struct Softmax {
  static constexpr float UNIT = 1.0f, SLACK = 5.5f;
  static constexpr Product PRODUCT = Product::F32;
  static vf power(vf x) { return vexp(x); }
};
template <>
struct Softmax<bf16> {
  static constexpr float UNIT = LOG2_E, SLACK = 8.0f;
  static constexpr Product PRODUCT = Product::BF16;
  static vf power(vf x) { return vexp2_fast(x); }
};

// What a tile has gathered over some keys.
struct State {
  float* acc;    // [bands][width][BAND], unnormalized values
  float* top;    // [bands * BAND], reference that exponentials are relative to
  float* total;  // [bands * BAND], sum of exponentials
};

template <class E>
struct Tile {
  int64_t rows, bands, dim, depth, width;  // depth: dim padded for the key product; width: for the value product
  E* query;       // [bands * 2] panels
  int32_t* seen;  // [bands * BAND], keys that a query row may see, from the first of the sequence
  E* keys;        // two blocks [KEY_BLOCK][depth]
  E* staged;      // [KEY_BLOCK][width], values that had to be converted
  E* values;      // two blocks [width][KEY_BLOCK]
  float* scores;  // two of [KEY_BLOCK][BAND]
  E* weights;     // two panels
  State part;     // of the current segment
  State whole;    // of all segments before
};

State place_state(float* at, int64_t bands, int64_t width) {
  return {at, at + bands * BAND * width, at + bands * BAND * (width + 1)};
}

void clear_state(const State& s, int64_t bands, int64_t width) {
  std::memset(s.acc, 0, bands * width * BAND * 4);
  std::memset(s.total, 0, bands * BAND * 4);
  for (int64_t i = 0; i < bands * BAND; ++i) s.top[i] = FLOOR;
}

template <class E>
Tile<E> make_tile(Buffer& scratch, int64_t rows, int64_t dim) {
  Tile<E> t = {};
  t.rows = rows;
  t.bands = ceil_div(rows, BAND);
  t.dim = dim;
  t.depth = t.width = round_up(dim, 32);
  const int64_t lanes = t.bands * BAND;
  const int64_t elements = lanes * t.depth + KEY_BLOCK * (2 * t.depth + 3 * t.width + BAND);
  const int64_t floats = 2 * KEY_BLOCK * BAND + 2 * state_floats(t.bands, t.width);
  auto* bytes = scratch.get<uint8_t>(elements * int64_t(sizeof(E)) + floats * 4 + lanes * 4);
  // Every part is a multiple of 64 bytes.
  t.query = (E*)bytes;
  t.keys = t.query + lanes * t.depth;
  t.staged = t.keys + 2 * KEY_BLOCK * t.depth;
  t.values = t.staged + KEY_BLOCK * t.width;
  t.weights = t.values + 2 * KEY_BLOCK * t.width;
  t.scores = (float*)(t.weights + KEY_BLOCK * BAND);
  float* states = t.scores + 2 * KEY_BLOCK * BAND;
  t.part = place_state(states, t.bands, t.width);
  t.whole = place_state(states + state_floats(t.bands, t.width), t.bands, t.width);
  t.seen = (int32_t*)(states + 2 * state_floats(t.bands, t.width));
  return t;
}

// Panels of a band that hold query rows.
template <class E>
int panels_of(const Tile<E>& t, int64_t band) {
  return t.rows - band * BAND > PANEL ? 2 : 1;
}

template <class A, class E>
void load_queries(const Tile<E>& t, const AttentionCall& call, const AttentionTask& task) {
  const int64_t group = call.group(), lanes = t.bands * BAND;
  const int64_t token = call.step.query_start[task.row] + task.first_token;
  const A* query = (const A*)call.query + task.kv_head * group * t.dim;
  const HrStep& step = call.step;
  const int64_t span = step.query_start[task.row + 1] - step.query_start[task.row];
  const int64_t before = step.seq_lens[task.row] - span + task.first_token;
  for (int64_t lane = 0; lane < lanes; lane += VL) {
    E* panel = t.query + lane / PANEL * PANEL * t.depth + lane % PANEL * (4 / sizeof(E));
    const E* rows[VL];
    for (int64_t i = 0; i < VL; ++i) {
      // Lanes past the last row repeat it.
      const int64_t r = lane + i < t.rows ? lane + i : t.rows - 1;
      const A* row = query + (token + r / group) * call.query_ld + r % group * t.dim;
      t.seen[lane + i] = int32_t(before + r / group + 1);
      if constexpr (sizeof(A) == sizeof(E)) {
        rows[i] = row;
      } else {
        rows[i] = t.keys + i * t.depth;
        convert_row(row, t.dim, t.depth, t.keys + i * t.depth);
      }
    }
    pack_lanes(rows, sizeof(A) == sizeof(E) ? t.dim : t.depth, t.depth, panel);
  }
}

// A block's keys and values as they lie in the cache, and their scales where that holds int8.
template <class S>
struct Block {
  int64_t count;
  const S* keys[KEY_BLOCK];
  const S* values[KEY_BLOCK];
  float key_scales[KEY_BLOCK];
  float value_scales[KEY_BLOCK];
};

template <class S>
void find_block(const AttentionCall& call, Slots& slots, int64_t count, Block<S>& block) {
  const HrStep& step = call.step;
  block.count = count;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t offset = slots.next();
    block.keys[j] = (const S*)step.keys[call.layer] + offset;
    block.values[j] = (const S*)step.values[call.layer] + offset;
    if constexpr (sizeof(S) == 1) {
      block.key_scales[j] = step.key_scales[call.layer][offset / step.head_dim];
      block.value_scales[j] = step.value_scales[call.layer][offset / step.head_dim];
    }
  }
  for (int64_t j = count; j < KEY_BLOCK; ++j) block.key_scales[j] = block.value_scales[j] = 0.0f;
}

template <class S>
void fetch_block(const Block<S>& block, int64_t dim) {
  for (int64_t j = 0; j < block.count; ++j) {
    for (int64_t at = 0; at < dim * int64_t(sizeof(S)); at += 64) {
      __builtin_prefetch((const uint8_t*)block.keys[j] + at);
      __builtin_prefetch((const uint8_t*)block.values[j] + at);
    }
  }
}

// Block `at` of the tile's two. Slots past the end are not read, they may hold anything: zeros stand in for them.
template <class S, class E>
void load_block(const Tile<E>& t, const Block<S>& block, int64_t at) {
  E* const to = t.keys + at * KEY_BLOCK * t.depth;
  const E* values[KEY_BLOCK];
  for (int64_t j = 0; j < block.count; ++j) {
    convert_row(block.keys[j], t.dim, t.depth, to + j * t.depth);
    values[j] = t.staged + j * t.width;
    if constexpr (std::is_same_v<S, E>) {
      if (t.dim == t.width) {
        values[j] = block.values[j];
        continue;
      }
    }
    convert_row(block.values[j], t.dim, t.width, t.staged + j * t.width);
  }
  for (int64_t j = block.count; j < KEY_BLOCK; ++j) {
    std::memset(to + j * t.depth, 0, t.depth * sizeof(E));
    std::memset(t.staged + j * t.width, 0, t.width * sizeof(E));
    values[j] = t.staged + j * t.width;
  }
  transpose_values(values, KEY_BLOCK, t.width, t.values + at * KEY_BLOCK * t.width);
}

template <class E>
float* scores_of(const Tile<E>& t, int64_t band) {
  return t.scores + band % 2 * KEY_BLOCK * BAND;
}

template <class E>
void multiply_keys(const Tile<E>& t, int64_t at, int64_t band) {
  TileJob job = {};
  job.a = (const uint8_t*)(t.keys + at * KEY_BLOCK * t.depth);
  job.lda = t.depth * sizeof(E);
  job.steps = t.depth * sizeof(E) / 4;
  job.rows = KEY_BLOCK;
  job.num_panels = panels_of(t, band);
  for (int p = 0; p < 2; ++p) job.panels[p] = (const uint8_t*)(t.query + (band * 2 + p) * PANEL * t.depth);
  job.c = scores_of(t, band);
  job.ldc = BAND;
  multiply_tile(Softmax<E>::PRODUCT, job);
}

template <class E>
void multiply_values(const Tile<E>& t, int64_t at, int64_t band) {
  TileJob job = {};
  job.a = (const uint8_t*)(t.values + at * KEY_BLOCK * t.width);
  job.lda = KEY_BLOCK * sizeof(E);
  job.steps = KEY_BLOCK * sizeof(E) / 4;
  job.rows = t.width;
  job.num_panels = panels_of(t, band);
  for (int p = 0; p < 2; ++p) job.panels[p] = (const uint8_t*)(t.weights + p * PANEL * KEY_BLOCK);
  job.c = t.part.acc + band * t.width * BAND;
  job.ldc = BAND;
  job.accumulate = true;
  multiply_tile(Softmax<E>::PRODUCT, job);
}

// What sums relative to `from` are multiplied with to be relative to `to`, which is not below it. Exactly 1 where equal.
template <class E>
inline vf rescaling(vf from, vf to) {
  return to > from ? Softmax<E>::power(from - to) : splat(1.0f);
}

// Masks and scales the scores of VL query rows, and moves their reference where it must: what was gathered before is then
// to be multiplied with `factor`. Returns whether any has moved.
template <class E, bool MASKED, bool SCALED>
bool find_reference(const Tile<E>& t, float* scores, const float* key_scales, int64_t first, int64_t lane, float scale,
                    vf& factor) {
  const vi seen = load_as<vi>(t.seen + lane) - int32_t(first);
  vf highest[4] = {splat(FLOOR), splat(FLOOR), splat(FLOOR), splat(FLOOR)};
  for (int64_t j = 0; j < KEY_BLOCK; j += 4) {
    for (int i = 0; i < 4; ++i) {
      vf score = load(scores + (j + i) * BAND);
      if constexpr (SCALED) score *= key_scales[j + i];
      if constexpr (MASKED) score = seen > int32_t(j + i) ? score : splat(FLOOR);
      if constexpr (MASKED || SCALED) store(scores + (j + i) * BAND, score);
      highest[i] = vmax(score, highest[i]);
    }
  }
  const vf peak = vmax(vmax(highest[0], highest[1]), vmax(highest[2], highest[3])) * scale;
  const vf top = load(t.part.top + lane);
  const vi grows = peak > top + Softmax<E>::SLACK;
  if (!any_lane(grows)) return false;
  const vf moved = grows ? peak : top;
  factor = rescaling<E>(top, moved);
  store(t.part.top + lane, moved);
  store(t.part.total + lane, load(t.part.total + lane) * factor);
  return true;
}

// Values that VL query rows have gathered, times `factor`.
template <class E>
void rescale(const Tile<E>& t, int64_t lane, vf factor) {
  float* acc = t.part.acc + lane / BAND * t.width * BAND + lane % BAND;
  for (int64_t d = 0; d < t.width; ++d) store(acc + d * BAND, load(acc + d * BAND) * factor);
}

// Scores of VL query rows -> weights [KEY_BLOCK] of a panel's lanes. Calls between(j) in front of every 16 keys.
template <class E, bool MASKED, bool SCALED, class F>
inline void exponentials(const Tile<E>& t, const float* scores, const float* value_scales, int64_t first, int64_t lane,
                         float scale, E* panel, F&& between) {
  const vi seen = load_as<vi>(t.seen + lane) - int32_t(first);
  const vf top = load(t.part.top + lane);
  vf even = {}, odd = {};
  for (int64_t chunk = 0; chunk < KEY_BLOCK; chunk += 16) {
    between(chunk);
    for (int64_t j = chunk; j < chunk + 16; j += 2) {
      vf a = Softmax<E>::power(load(scores + j * BAND) * scale - top);
      vf b = Softmax<E>::power(load(scores + (j + 1) * BAND) * scale - top);
      if constexpr (MASKED) {
        a = (vf)((vi)a & (seen > int32_t(j)));
        b = (vf)((vi)b & (seen > int32_t(j + 1)));
      }
      even += a;
      odd += b;
      if constexpr (SCALED) {
        a *= value_scales[j];
        b *= value_scales[j + 1];
      }
      store_weights(a, b, j, lane % PANEL, panel);
    }
  }
  store(t.part.total + lane, load(t.part.total + lane) + (even + odd));
}

template <class E, bool MASKED, bool SCALED>
void soften_lanes(const Tile<E>& t, float* scores, const float* key_scales, const float* value_scales, int64_t first,
                  int64_t lane, float scale) {
  vf factor;
  scores += lane % BAND;
  if (find_reference<E, MASKED, SCALED>(t, scores, key_scales, first, lane, scale, factor)) rescale(t, lane, factor);
  exponentials<E, MASKED, SCALED>(t, scores, value_scales, first, lane, scale,
                                  t.weights + lane % BAND / PANEL * PANEL * KEY_BLOCK, [](int64_t) {});
}

template <class S, class E>
void soften_band(const Tile<E>& t, const Block<S>& block, int64_t first, int64_t band, float scale) {
  constexpr bool SCALED = sizeof(S) == 1;
  const bool masked = t.seen[band * BAND] < first + KEY_BLOCK;
  const auto run = masked ? soften_lanes<E, true, SCALED> : soften_lanes<E, false, SCALED>;
  const int64_t end = band * BAND + panels_of(t, band) * PANEL;
  for (int64_t lane = band * BAND; lane < end; lane += VL) {
    run(t, scores_of(t, band), block.key_scales, block.value_scales, first, lane, scale);
  }
}

// whole += part, for all rows of a tile. Out of line, so that decodes and prefills share its every rounding.
template <class E>
__attribute__((noinline)) void fold(const State& whole, const State& part, int64_t rows, int64_t width) {
  for (int64_t lane = 0; lane < rows; lane += VL) {
    const vf before = load(whole.top + lane), after = load(part.top + lane), top = vmax(before, after);
    const vf keep = rescaling<E>(before, top), add = rescaling<E>(after, top);
    const int64_t at = lane / BAND * width * BAND + lane % BAND;
    for (int64_t d = 0; d < width; ++d) {
      float* sum = whole.acc + at + d * BAND;
      store(sum, load(sum) * keep + load(part.acc + at + d * BAND) * add);
    }
    store(whole.total + lane, load(whole.total + lane) * keep + load(part.total + lane) * add);
    store(whole.top + lane, top);
  }
}

template <class A>
void write_results(const State& state, const AttentionCall& call, int32_t row, int32_t kv_head, int32_t first_token,
                   int64_t rows) {
  const int64_t group = call.group(), dim = call.step.head_dim, width = round_up(dim, 32);
  A* out = (A*)call.out + (call.step.query_start[row] + first_token) * call.out_ld + kv_head * group * dim;
  for (int64_t lane = 0; lane < rows; lane += VL) {
    const vf factor = 1.0f / load(state.total + lane);
    const float* acc = state.acc + lane / BAND * width * BAND + lane % BAND;
    for (int64_t d = 0; d < dim; d += VL) {
      vu block[VL];
      for (int i = 0; i < VL; ++i) block[i] = (vu)(load(acc + (d + i) * BAND) * factor);
      transpose(block);
      for (int64_t r = lane; r < rows && r < lane + VL; ++r) {
        store_upto(out + r / group * call.out_ld + r % group * dim + d, (vf)block[r - lane], dim - d);
      }
    }
  }
}

#include "amx_attention.h"

// Every band that may see keys of the block. The products of the next band are under way while this one's exponentials
// are computed: the matrix unit works beside the vector units.
template <class S, class E>
void attend_block(const Tile<E>& t, const Block<S>& block, int64_t at, int64_t first, float scale) {
  int64_t band = 0;
  while (t.seen[band * BAND + BAND - 1] <= first) ++band;
  multiply_keys(t, at, band);
  for (; band < t.bands; ++band) {
    if (band + 1 < t.bands) multiply_keys(t, at, band + 1);
    soften_band(t, block, first, band, scale);
    multiply_values(t, at, band);
  }
}

// One or two loaded blocks, the first of which begins at key `first`.
template <class S, class E>
void attend_blocks(const Tile<E>& t, const Block<S>* const* blocks, int64_t first, int count, float scale) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(E) == 2) {
    if (t.width == AMX_WIDTH) return amx_attend(t, blocks, first, count, scale);
  }
#endif
  for (int i = 0; i < count; ++i) attend_block(t, *blocks[i], i, first + i * KEY_BLOCK, scale);
}

}  // namespace

template <class A, class S>
void attend_tile(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task) {
  using E = typename Element<A>::Type;
  const int64_t dim = call.step.head_dim;
  const float scale = Softmax<E>::UNIT / std::sqrt(float(dim));
  Tile<E> t = make_tile<E>(ws.thread_scratch[rank], task.num_tokens * call.group(), dim);
  load_queries<A>(t, call, task);
  clear_state(t.part, t.bands, t.width);
  bool folded = false;
  Block<S> ring[4];
  Slots slots(call.step, task.row, task.first_key, task.kv_head);
  // The blocks from `first` on of the pair that begins there, found in the half of the ring that is theirs.
  const auto find_pair = [&](int64_t first) {
    for (int64_t i = 0; i < 2 && first + i * KEY_BLOCK < task.last_key; ++i) {
      Block<S>& block = ring[first / KEY_BLOCK % 4 + i];
      find_block(call, slots, std::min(task.last_key - first - i * KEY_BLOCK, KEY_BLOCK), block);
      // A tile of few rows waits for memory; one of many finds most in the cache.
      if (t.bands == 1) fetch_block(block, dim);
    }
  };
  find_pair(task.first_key);
  for (int64_t first = task.first_key; first < task.last_key; first += 2 * KEY_BLOCK) {
    const int64_t next = first + 2 * KEY_BLOCK;
    if (next < task.last_key) find_pair(next);
    const Block<S>* pair[2] = {&ring[first / KEY_BLOCK % 4], &ring[first / KEY_BLOCK % 4 + 1]};
    const int count = first + KEY_BLOCK < task.last_key ? 2 : 1;
    for (int i = 0; i < count; ++i) load_block(t, *pair[i], i);
    attend_blocks(t, pair, first, count, scale);
    if (next == segment_end(first) && next < task.last_key) {
      if (folded) {
        fold<E>(t.whole, t.part, t.rows, t.width);
      } else {
        std::swap(t.whole, t.part);
        folded = true;
      }
      clear_state(t.part, t.bands, t.width);
    }
  }
  if (task.partial >= 0) {
    std::memcpy(ws.partials.get<float>(0) + task.partial, t.part.acc, state_floats(1, t.width) * 4);
    return;
  }
  if (folded) fold<E>(t.whole, t.part, t.rows, t.width);
  write_results<A>(folded ? t.whole : t.part, call, task.row, task.kv_head, task.first_token, t.rows);
}

template <class A>
void merge_tiles(Workspace& ws, const AttentionCall& call, const MergeTask& task) {
  using E = typename Element<A>::Type;
  const int64_t width = round_up(call.step.head_dim, 32), rows = task.num_tokens * call.group();
  float* parts = ws.partials.get<float>(0) + task.partial;
  const State whole = place_state(parts, 1, width);
  for (int64_t i = 1; i < task.count; ++i) {
    fold<E>(whole, place_state(parts + i * state_floats(1, width), 1, width), rows, width);
  }
  write_results<A>(whole, call, task.row, task.kv_head, task.first_token, rows);
}

template void attend_tile<float, float>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<float, bf16>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<float, int8_t>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<bf16, float>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<bf16, bf16>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<bf16, int8_t>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void merge_tiles<float>(Workspace&, const AttentionCall&, const MergeTask&);
template void merge_tiles<bf16>(Workspace&, const AttentionCall&, const MergeTask&);

}  // namespace headrace
