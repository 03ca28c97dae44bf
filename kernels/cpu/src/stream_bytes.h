// Values and weights of a stream over int8 as bytes of tiles (stream_int8.cpp, which alone includes this).
#pragma once

#include "stream_softmax.h"

#if defined(__AMX_INT8__)

namespace headrace {
namespace {

// Features of a key's tile; features of a value's tile; the most that two bytes with a sign hold, the low one's too.
constexpr int64_t DEPTH = 64, WIDTH = 16;
constexpr float MOST_QUERY = 32512.0f, MOST_WEIGHT = 65535.0f;

// What a KV head's weights are made of, beside its scores.
template <int LANES>
struct Weigher {
  vf scale;          // of scores, by query head
  vf top;            // reference of the exponentials
  vf inverse;        // of a step of the two-byte weights
  const float* value_scales;
};

// Four keys' rows of 64 bytes -> their row in each of four tiles.
inline void interleave_four(const int8_t* const* rows, int8_t* to) {
  const __m512i a = _mm512_loadu_si512(rows[0]), b = _mm512_loadu_si512(rows[1]);
  const __m512i c = _mm512_loadu_si512(rows[2]), d = _mm512_loadu_si512(rows[3]);
  const __m512i low = _mm512_unpacklo_epi8(a, b), low2 = _mm512_unpacklo_epi8(c, d);
  const __m512i high = _mm512_unpackhi_epi8(a, b), high2 = _mm512_unpackhi_epi8(c, d);
  constexpr int64_t TILE = KEY_BLOCK * WIDTH;
  _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low, low2));
  _mm512_storeu_si512(to + TILE, _mm512_unpackhi_epi16(low, low2));
  _mm512_storeu_si512(to + 2 * TILE, _mm512_unpacklo_epi16(high, high2));
  _mm512_storeu_si512(to + 3 * TILE, _mm512_unpackhi_epi16(high, high2));
}

// Sums times `factor`: of every 64 features, four vectors of four at 0, 16, 32 and 48 -> as they follow each other.
template <class T>
void in_order(const float* acc, float factor, int64_t dim, T* out) {
  for (int64_t d = 0; d < dim; d += DEPTH) {
    __m512 v[4];
    for (int i = 0; i < 4; ++i) v[i] = (__m512)(load(acc + d + i * VL) * factor);
    const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[2], v[3], 0x44);
    const __m512 c = _mm512_shuffle_f32x4(v[0], v[1], 0xee), e = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
    store(out + d, (vf)_mm512_shuffle_f32x4(a, b, 0x88));
    store(out + d + VL, (vf)_mm512_shuffle_f32x4(a, b, 0xdd));
    store(out + d + 2 * VL, (vf)_mm512_shuffle_f32x4(c, e, 0x88));
    store(out + d + 3 * VL, (vf)_mm512_shuffle_f32x4(c, e, 0xdd));
  }
}

// Weights of 16 keys, two bytes each -> their place in the rows of high and of low bytes.
template <int LANES>
void store_bytes(vi* v, uint8_t* weights);

template <>
void store_bytes<4>(vi* v, uint8_t* weights) {
  // Every lane holds a query head's weights of two keys, 8 keys apart.
  const __m512i first = (__m512i)(v[0] | (v[2] << 16)), second = (__m512i)(v[1] | (v[3] << 16));
  alignas(64) static constexpr auto pick = [] {
    struct { uint8_t lane[64] = {}; } index;
    for (int i = 0; i < 64; ++i) {
      const int q = i / 16, key = i % 16;
      index.lane[i] = uint8_t(key % 8 / 4 * 64 + (key % 4 * 4 + q) * 4 + key / 8 * 2);
    }
    return index;
  }();
  const __m512i low = _mm512_load_si512(&pick), high = _mm512_add_epi8(low, _mm512_set1_epi8(1));
  for (const __m512i& index : {high, low}) {
    const __m512i bytes = _mm512_permutex2var_epi8(first, index, second);
    _mm_storeu_si128((__m128i*)weights, _mm512_castsi512_si128(bytes));
    _mm_storeu_si128((__m128i*)(weights + KEY_BLOCK), _mm512_extracti32x4_epi32(bytes, 1));
    _mm_storeu_si128((__m128i*)(weights + 2 * KEY_BLOCK), _mm512_extracti32x4_epi32(bytes, 2));
    _mm_storeu_si128((__m128i*)(weights + 3 * KEY_BLOCK), _mm512_extracti32x4_epi32(bytes, 3));
    weights += 4 * KEY_BLOCK;
  }
}

template <>
void store_bytes<16>(vi* v, uint8_t* weights) {
  transpose((vu*)v);
  for (int q = 0; q < VL; ++q) {
    _mm_storeu_si128((__m128i*)(weights + q * KEY_BLOCK), _mm512_cvtepi32_epi8((__m512i)(v[q] >> 8)));
    _mm_storeu_si128((__m128i*)(weights + (VL + q) * KEY_BLOCK), _mm512_cvtepi32_epi8((__m512i)v[q]));
  }
}

// 2^(scores * scale - top) times the values' scales, in steps -> [2 * LANES][KEY_BLOCK], high bytes first. Returns the
// sum without these scales, spread over the lanes of each query head.
template <int LANES>
vf make_byte_weights(const float* scores, const Weigher<LANES>& by, uint8_t* weights) {
  vf total = {};
  vi some[LANES];
  for (int i = 0; i < KEY_BLOCK * LANES / VL; ++i) {
    const vf weight = vexp2_fast(load(scores + i * VL) * by.scale - by.top);
    total += weight;
    const vf steps = weight * spread<LANES>(by.value_scales, i) * by.inverse;
    some[i % LANES] = (vi)_mm512_cvtps_epi32(_mm512_min_ps((__m512)steps, _mm512_set1_ps(MOST_WEIGHT)));
    if (i % LANES == LANES - 1) store_bytes<LANES>(some, weights + (i + 1) * (VL / LANES) - VL);
  }
  return total;
}

}  // namespace
}  // namespace headrace

#endif
