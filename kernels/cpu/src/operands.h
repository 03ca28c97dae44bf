// Queries, keys and values as operands of tile.h. Caches may hold another type than is multiplied: rows are converted
// on the way.
#pragma once

#include "tile.h"

namespace headrace {

// One row of `dim` elements -> `padded` of the multiplied type, zero past dim. padded is a multiple of 32. Only int8 has
// a scale.
template <class S, class E>
inline void convert_row(const S* row, float scale, int64_t dim, int64_t padded, E* to) {
  for (int64_t d = 0; d < padded; d += VL) {
    const vf part = load_from(row, d, dim);
    store(to + d, sizeof(S) == 1 ? part * scale : part);
  }
}

// Rows of VL query vectors -> their lanes of a panel's steps.
inline void pack_lanes(const float* const* rows, int64_t dim, int64_t depth, float* panel) {
  for (int64_t d = 0; d < depth; d += VL) {
    vu block[VL];
    for (int j = 0; j < VL; ++j) block[j] = (vu)load_from(rows[j], d, dim);
    transpose(block);
    for (int i = 0; i < VL; ++i) store_as(panel + (d + i) * PANEL, block[i]);
  }
}

// Values of `keys` rows -> [width][keys]. Both are multiples of 32.
inline void transpose_values(const float* const* rows, int64_t keys, int64_t width, float* to) {
  for (int64_t j = 0; j < keys; j += VL) {
    for (int64_t d = 0; d < width; d += VL) {
      vu block[VL];
      for (int i = 0; i < VL; ++i) block[i] = load_as<vu>(rows[j + i] + d);
      transpose(block);
      for (int i = 0; i < VL; ++i) store_as(to + (d + i) * keys + j, block[i]);
    }
  }
}

// The weights that two consecutive keys have for VL lanes of a panel.
inline void store_weights(vf even, vf odd, int64_t key, int64_t lane, float* panel) {
  store(panel + key * PANEL + lane, even);
  store(panel + (key + 1) * PANEL + lane, odd);
}

#if defined(__AVX512BF16__)
typedef uint16_t Halves __attribute__((vector_size(64)));
using HalfLanes = std::make_integer_sequence<int, 32>;

// Up to 32 elements of a row of bf16, zero past n.
inline vu load_pairs(const bf16* p, int64_t n) {
  if (n >= 32) return load_as<vu>(p);
  uint16_t lanes[32] = {};
  if (n > 0) std::memcpy(lanes, p, n * 2);
  return load_as<vu>(lanes);
}

inline void convert_row(const bf16* row, float, int64_t dim, int64_t padded, bf16* to) {
  for (int64_t d = 0; d < padded; d += 32) store_as(to + d, load_pairs(row + d, dim - d));
}

inline void pack_lanes(const bf16* const* rows, int64_t dim, int64_t depth, bf16* panel) {
  for (int64_t d = 0; d < depth; d += 2 * VL) {
    vu block[VL];
    for (int j = 0; j < VL; ++j) block[j] = load_pairs(rows[j] + d, dim - d);
    transpose(block);
    for (int i = 0; i < VL; ++i) store_as(panel + (d + 2 * i) * PANEL, block[i]);
  }
}

template <int... I>
inline Halves interleave_low(Halves a, Halves b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I % 2 * 32 + I / 2)...);
}
template <int... I>
inline Halves interleave_high(Halves a, Halves b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I % 2 * 32 + I / 2 + 16)...);
}
template <int... I>
inline Halves interleave_own(Halves a, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, a, (I % 2 * 16 + I / 2)...);
}

// Pairs of keys become the 32-bit elements of square blocks.
inline void transpose_values(const bf16* const* rows, int64_t keys, int64_t width, bf16* to) {
  for (int64_t j = 0; j < keys; j += 32) {
    for (int64_t d = 0; d < width; d += 32) {
      vu low[VL], high[VL];
      for (int i = 0; i < VL; ++i) {
        const auto even = load_as<Halves>(rows[j + 2 * i] + d), odd = load_as<Halves>(rows[j + 2 * i + 1] + d);
        low[i] = (vu)interleave_low(even, odd, HalfLanes{});
        high[i] = (vu)interleave_high(even, odd, HalfLanes{});
      }
      transpose(low);
      transpose(high);
      for (int i = 0; i < VL; ++i) {
        store_as(to + (d + i) * keys + j, low[i]);
        store_as(to + (d + VL + i) * keys + j, high[i]);
      }
    }
  }
}

// Each lane's two numbers as bf16 side by side, `even` first.
inline vu pair_up(vf even, vf odd) {
  const auto both = (Halves)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (vu)interleave_own(both, HalfLanes{});
}

inline void store_weights(vf even, vf odd, int64_t key, int64_t lane, bf16* panel) {
  store_as(panel + key * PANEL + 2 * lane, pair_up(even, odd));
}
#endif

}  // namespace headrace
