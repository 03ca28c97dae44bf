// What attention tiles are made of (tiled.cpp): their memory, and the operands and blocks of keys that are loaded into it.
// Included by tiled.cpp alone.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "operands.h"

// Whether weights in bf16 are made as half_softmax.h does.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HR_HALF_WEIGHTS 1
#else
#define HR_HALF_WEIGHTS 0
#endif

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

// What sums relative to `from` are multiplied with to be relative to `to`, which is not below it. Exactly 1 where equal,
// and exact where references are whole numbers (half_softmax.h).
template <class E>
inline vf rescaling(vf from, vf to) {
#if HR_HALF_WEIGHTS
  if constexpr (sizeof(E) == 2) return to > from ? scale_by_power(splat(1.0f), from - to) : splat(1.0f);
#endif
  return to > from ? Softmax<E>::power(from - to) : splat(1.0f);
}

// What a tile has gathered over some keys.
struct State {
  float* acc;    // [bands][width][BAND], unnormalized values
  float* top;    // [bands * BAND], reference that exponentials are relative to
  float* total;  // [bands * BAND], sum of exponentials
};

template <class E>
struct Tile {
  int64_t bands, dim, depth, width;  // depth: dim padded for the key product; width: for the value product
  int64_t first, last;  // panels that are computed now, exclusive: all, or those of one row among several
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

// Those of a band that are computed now.
struct Panels {
  int64_t first, last;
};

template <class E>
Panels panels_of(const Tile<E>& t, int64_t band) {
  return {std::max(t.first, 2 * band), std::min(t.last, 2 * band + 2)};
}

// Of the panels that are computed now.
template <class E>
void clear_part(const Tile<E>& t) {
  for (int64_t band = t.first / 2; 2 * band < t.last; ++band) {
    const auto [begin, end] = panels_of(t, band);
    float* acc = t.part.acc + band * t.width * BAND;
    if (end - begin == 2) {
      std::memset(acc, 0, t.width * BAND * 4);
    } else {
      for (int64_t d = 0; d < t.width; ++d) std::memset(acc + d * BAND + begin % 2 * PANEL, 0, PANEL * 4);
    }
  }
  for (int64_t lane = t.first * PANEL; lane < t.last * PANEL; ++lane) {
    t.part.total[lane] = 0.0f;
    t.part.top[lane] = FLOOR;
  }
}

template <class E>
Tile<E> make_tile(Buffer& scratch, int64_t panels, int64_t dim) {
  Tile<E> t = {};
  t.last = panels;
  t.bands = ceil_div(panels, 2);
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

// Query rows of a member, whole panels of them.
inline int64_t lanes_of(const TileMember& member, int64_t group) { return round_up(member.num_tokens * group, PANEL); }

// A member's queries of one KV head, from lane `start` on.
template <class A, class E>
void load_queries(const Tile<E>& t, const AttentionCall& call, const TileMember& member, int64_t kv_head,
                  int64_t start) {
  const HrStep& step = call.step;
  const int64_t group = call.group(), count = member.num_tokens * group;
  const int64_t token = step.query_start[member.row] + member.first_token;
  const A* query = (const A*)call.query + kv_head * group * t.dim;
  const int64_t span = step.query_start[member.row + 1] - step.query_start[member.row];
  const int64_t before = step.seq_lens[member.row] - span + member.first_token;
  for (int64_t lane = start; lane < start + lanes_of(member, group); lane += VL) {
    E* panel = t.query + lane / PANEL * PANEL * t.depth + lane % PANEL * (4 / sizeof(E));
    const E* rows[VL];
    for (int64_t i = 0; i < VL; ++i) {
      // Lanes past the last row repeat it.
      const int64_t r = std::min(lane - start + i, count - 1);
      const A* row = query + (token + r / group) * call.query_ld + r % group * t.dim;
      t.seen[lane + i] = int32_t(before + r / group + 1);
      if constexpr (sizeof(A) == sizeof(E)) {
        rows[i] = row;
      } else {
        rows[i] = t.keys + i * t.depth;
        convert_row(row, 1.0f, t.dim, t.depth, t.keys + i * t.depth);
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

// Block `at` of the tile's two. Slots past the end are not read, they may hold anything: zeros stand in for them. int8
// is scaled here, once for all query rows; for bf16 models it is rounded as a cache in bf16 would be.
template <class S, class E>
void load_block(const Tile<E>& t, const Block<S>& block, int64_t at) {
  E* const to = t.keys + at * KEY_BLOCK * t.depth;
  const E* values[KEY_BLOCK];
  for (int64_t j = 0; j < block.count; ++j) {
    convert_row(block.keys[j], block.key_scales[j], t.dim, t.depth, to + j * t.depth);
    values[j] = t.staged + j * t.width;
    if constexpr (std::is_same_v<S, E>) {
      if (t.dim == t.width) {
        values[j] = block.values[j];
        continue;
      }
    }
    convert_row(block.values[j], block.value_scales[j], t.dim, t.width, t.staged + j * t.width);
  }
  for (int64_t j = block.count; j < KEY_BLOCK; ++j) {
    std::memset(to + j * t.depth, 0, t.depth * sizeof(E));
    std::memset(t.staged + j * t.width, 0, t.width * sizeof(E));
    values[j] = t.staged + j * t.width;
  }
  transpose_values(values, KEY_BLOCK, t.width, t.values + at * KEY_BLOCK * t.width);
}

}  // namespace
}  // namespace headrace
