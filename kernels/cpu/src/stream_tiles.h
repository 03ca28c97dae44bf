// Tile operands and products of a stream (stream.cpp), which alone includes this.
#pragma once

#include <type_traits>

#include "attention.h"
#include "operands.h"

#if defined(__AMX_BF16__)

namespace headrace {
namespace {

// Keys of the two runs that a block of values consists of.
constexpr int64_t RUN = 32, MAX_DIM = 512;

// Tiles 0-3: sums, 16 features each; 4: queries; 5: keys or values; 6: scores; 7: weights.
void configure(int64_t heads, int64_t lanes) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile : {0, 1, 2, 3, 7}) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = uint8_t(heads);
  }
  for (int tile : {4, 5, 6}) {
    config.row_bytes[tile] = uint16_t(tile == 5 ? 64 : lanes * 4);
    config.rows[tile] = 16;
  }
  __asm__ volatile("" ::"m"(config) : "memory");
  _tile_loadconfig(&config);
}

inline vu interleaved(vu even, vu odd, std::integral_constant<bool, false>) {
  return (vu)_mm512_unpacklo_epi16((__m512i)even, (__m512i)odd);
}
inline vu interleaved(vu even, vu odd, std::integral_constant<bool, true>) {
  return (vu)_mm512_unpackhi_epi16((__m512i)even, (__m512i)odd);
}

// sums [query heads][dim] += weights * interleaved values, 16 features for each of TILES, over `keys` keys.
template <int TILES>
void add_features(int64_t keys, int64_t dim, float* acc, const bf16* values, const bf16* weights) {
  const int64_t ld = dim * 4;
  _tile_loadd(0, acc, ld);
  _tile_loadd(1, acc + 16, ld);
  if constexpr (TILES > 2) _tile_loadd(2, acc + 32, ld);
  if constexpr (TILES > 2) _tile_loadd(3, acc + 48, ld);
  for (int64_t run = 0; run < keys; run += RUN) {
    const bf16* v = values + run * dim;
    _tile_loadd(7, weights + run, KEY_BLOCK * 2);
    _tile_loadd(5, v, 64);
    _tile_dpbf16ps(0, 7, 5);
    _tile_loadd(5, v + 16 * RUN, 64);
    _tile_dpbf16ps(1, 7, 5);
    if constexpr (TILES > 2) {
      _tile_loadd(5, v + 32 * RUN, 64);
      _tile_dpbf16ps(2, 7, 5);
      _tile_loadd(5, v + 48 * RUN, 64);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
  _tile_stored(0, acc, ld);
  _tile_stored(1, acc + 16, ld);
  if constexpr (TILES > 2) _tile_stored(2, acc + 32, ld);
  if constexpr (TILES > 2) _tile_stored(3, acc + 48, ld);
}

// Sums times `factor`, in the order that features have without interleaving.
template <class T>
void in_order(const float* acc, float factor, int64_t dim, T* out) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t d = 0; d < dim; d += 32) {
    const auto low = (__m512)(load(acc + d) * factor), high = (__m512)(load(acc + d + VL) * factor);
    store(out + d, (vf)_mm512_permutex2var_ps(low, first, high));
    store(out + d + VL, (vf)_mm512_permutex2var_ps(low, second, high));
  }
}

}  // namespace
}  // namespace headrace

#endif
