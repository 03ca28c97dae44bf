// Scores of a stream (stream.cpp) -> weights, by vectors. Scores come as [KEY_BLOCK][LANES], a query head a lane, so a
// vector holds several keys where there are few heads. Included by stream.cpp alone.
#pragma once

#include "attention.h"
#include "operands.h"

#if defined(__AMX_BF16__)

namespace headrace {
namespace {

// Below every score. Sums are relative to a reference that is at most 2^SLACK below the true maximum.
constexpr float NOTHING = -1e30f, SLACK = 8.0f;

// What a KV head has gathered. Lanes beyond the query heads are zero or never read.
struct Gathered {
  vf top;    // reference of the exponentials; the same in every lane of a query head
  vf total;  // sum of exponentials, still spread over the lanes of a query head
};

// The scales of the keys that vector i of scores holds, each as often as there are lanes.
template <int LANES>
inline vf spread(const float* scales, int i) {
  if constexpr (LANES == 16) return splat(scales[i]);
  const __m512i lane = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return (vf)_mm512_permutexvar_ps(lane, _mm512_castps128_ps512(_mm_loadu_ps(scales + i * 4)));
}

// The highest of each query head, in all its lanes.
template <int LANES>
inline vf highest(vf v) {
  if constexpr (LANES == 4) {
    v = vmax(v, (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e));
    v = vmax(v, (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1));
  }
  return v;
}

// 16 keys of four query heads, key by key -> their place in the four rows of weights.
inline void store_rows(const vf* v, bf16* weights) {
  const auto low = (__m512i)_mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]);
  const auto high = (__m512i)_mm512_cvtne2ps_pbh((__m512)v[3], (__m512)v[2]);
  // Every fourth element, from the first on in the lower half and from the second on in the upper.
  const __m256i fourth = _mm256_set_epi16(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
  const __m256i after = _mm256_add_epi16(fourth, _mm256_set1_epi16(1));
  const __m512i picked = _mm512_inserti64x4(_mm512_castsi256_si512(fourth), after, 1);
  for (int q = 0; q < 4; q += 2) {
    const __m512i two = _mm512_permutex2var_epi16(low, _mm512_add_epi16(picked, _mm512_set1_epi16(short(q))), high);
    _mm256_storeu_si256((__m256i*)(weights + q * KEY_BLOCK), _mm512_castsi512_si256(two));
    _mm256_storeu_si256((__m256i*)(weights + (q + 1) * KEY_BLOCK), _mm512_extracti64x4_epi64(two, 1));
  }
}

// The same of 16 query heads.
inline void store_transposed(const vf* v, bf16* weights) {
  vu block[VL];
  for (int i = 0; i < VL; ++i) block[i] = (vu)v[i];
  transpose(block);
  for (int q = 0; q < VL; ++q) store(weights + q * KEY_BLOCK, (vf)block[q]);
}

// The highest score of each query head, in all its lanes. Keys from `count` on are none.
template <int LANES>
vf find_peak(float* scores, int64_t count) {
  for (int64_t i = count * LANES; i < KEY_BLOCK * LANES; ++i) scores[i] = NOTHING;
  vf peaks[4] = {splat(NOTHING), splat(NOTHING), splat(NOTHING), splat(NOTHING)};
  for (int i = 0; i < KEY_BLOCK * LANES / VL; i += 4) {
    for (int k = 0; k < 4; ++k) peaks[k] = vmax(load(scores + (i + k) * VL), peaks[k]);
  }
  return highest<LANES>(vmax(vmax(peaks[0], peaks[1]), vmax(peaks[2], peaks[3])));
}

// 2^(scores * scale - top) -> weights [LANES][KEY_BLOCK]. Returns their sum, spread over the lanes of each query head.
template <int LANES>
vf make_weights(const float* scores, vf scale, vf top, bf16* weights) {
  vf total = {}, some[VL];
  for (int i = 0; i < KEY_BLOCK * LANES / VL; ++i) {
    some[i % VL] = vexp2_fast(load(scores + i * VL) * scale - top);
    total += some[i % VL];
    if constexpr (LANES == 4) {
      if (i % 4 == 3) store_rows(some + i % VL - 3, weights + i / 4 * VL);
    } else {
      if (i % VL == VL - 1) store_transposed(some, weights + i - i % VL);
    }
  }
  return total;
}

}  // namespace
}  // namespace headrace

#endif
