// Online softmax of attention tiles in bf16: weights are made as the 16 bits that the next product takes, two keys in a
// vector, by integers and a table instead of a polynomial. Included by tiled_softmax.h alone.
#pragma once

#include "tiled.h"

#if HR_HALF_WEIGHTS

namespace headrace {
namespace {

// Steps of a power of two, as the fraction of a bf16 has, and the float that stands for 2^0: one so large that its last
// bits are an integer, which counts such steps from where the exponent of a bf16 does.
constexpr float STEPS = 128.0f, UNIT_POWER = 12582912.0f + 127.0f * STEPS;

// By how much the fraction of 2^(f / 128) is smaller than f: round(f - 128 * (2^(f / 128) - 1)). Never more than f.
alignas(64) constexpr uint8_t BENDS[128] = {
    0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4,
    4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 8,
    8, 8, 8, 8, 8, 9, 9, 9, 9, 9, 9, 9, 10, 10, 10, 10,
    10, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11,
    11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11,
    11, 11, 10, 10, 10, 10, 10, 10, 10, 10, 10, 9, 9, 9, 9, 9,
    9, 9, 8, 8, 8, 8, 8, 7, 7, 7, 7, 7, 6, 6, 6, 6,
    5, 5, 5, 4, 4, 4, 3, 3, 3, 3, 2, 2, 1, 1, 1, 0};

// 2^(score * scale - top) of two consecutive keys for VL query rows -> bf16, within 0.65 %: 0.27 from powers in steps of
// 1 / 128, 0.37 from a fraction of 8 bits; where that is below 2^-125, this. base: UNIT_POWER - top * STEPS. Scores that
// are not a number give 0.
inline vu half_weights(vf even, vf odd, float scale, vf base) {
  // The last 16 bits of a float: powers as integers, in steps. Read as bf16 these are straight lines from one power of
  // two to the next, and what they are too high depends on the fraction alone.
  const vf lowest = splat(UNIT_POWER - 125.0f * STEPS);
  const auto a = (__m512i)vmax(lowest, even * (scale * STEPS) + base);  // in this order NaN stays NaN
  const auto b = (__m512i)vmax(lowest, odd * (scale * STEPS) + base);
  const __m512i places = _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100);
  const __m512i both = _mm512_mask_shuffle_epi8(a, 0xccccccccccccccccull, b, places);
  // The last 7 bits of a byte choose one of the table's.
  const __m512i low = _mm512_load_si512(BENDS), high = _mm512_load_si512(BENDS + 64);
  const __m512i bends = _mm512_maskz_permutex2var_epi8(0x5555555555555555ull, low, both, high);
  return (vu)_mm512_sub_epi16(both, bends);
}

// See find_reference of tiled_softmax.h. References are whole numbers, so that rescaling is exact. Rows with a score that
// is infinite or not a number get a sum that is not: their weights would not show it.
template <bool MASKED>
bool find_half_reference(const Tile<bf16>& t, const float* scores, int64_t first, int64_t lane, float scale, vf& factor) {
  const vi seen = load_as<vi>(t.seen + lane) - int32_t(first);
  vf highest[4] = {splat(FLOOR), splat(FLOOR), splat(FLOOR), splat(FLOOR)};
  __mmask16 numbers[2] = {0xffff, 0xffff};
  for (int64_t j = 0; j < KEY_BLOCK; j += 4) {
    vf score[4];
    for (int i = 0; i < 4; ++i) {
      score[i] = load(scores + (j + i) * BAND);
      if constexpr (MASKED) score[i] = seen > int32_t(j + i) ? score[i] : splat(FLOOR);
      highest[i] = vmax(score[i], highest[i]);
    }
    for (int i = 0; i < 2; ++i) {
      numbers[i] = _mm512_mask_cmp_ps_mask(numbers[i], (__m512)score[i], (__m512)score[i + 2], _CMP_ORD_Q);
    }
  }
  const vf peak = vmax(vmax(highest[0], highest[1]), vmax(highest[2], highest[3])) * scale;
  const vf top = load(t.part.top + lane);
  const vi grows = peak > top + Softmax<bf16>::SLACK;
  const __mmask16 sound = numbers[0] & numbers[1] & _mm512_cmp_ps_mask((__m512)peak, (__m512)splat(INFINITY), _CMP_LT_OQ);
  if (!any_lane(grows) && sound == 0xffff) return false;
  const vf moved = grows ? round_even(peak) : top;
  factor = rescaling<bf16>(top, moved);
  store(t.part.top + lane, moved);
  const vf total = load(t.part.total + lane) * factor;
  store(t.part.total + lane, (vf)_mm512_mask_blend_ps(sound, (__m512)splat(NAN), (__m512)total));
  return true;
}

// See exponentials of tiled_softmax.h. The sum is that of the rounded weights.
template <bool MASKED, class F>
inline void half_exponentials(const Tile<bf16>& t, const float* scores, int64_t first, int64_t lane, float scale,
                              bf16* panel, F&& between) {
  const vi seen = load_as<vi>(t.seen + lane) - int32_t(first);
  const vf base = UNIT_POWER - load(t.part.top + lane) * STEPS;
  const vu ones = splat(0x3f803f80u);
  vf totals[4] = {};
  for (int64_t chunk = 0; chunk < KEY_BLOCK; chunk += 16) {
    between(chunk);
    for (int64_t i = 0; i < 8; ++i) {
      const int64_t j = chunk + 2 * i;
      vu weights = half_weights(load(scores + j * BAND), load(scores + (j + 1) * BAND), scale, base);
      if constexpr (MASKED) {
        weights &= ((vu)(seen > int32_t(j)) & 0xffffu) | ((vu)(seen > int32_t(j + 1)) & 0xffff0000u);
      }
      totals[i % 4] = dot2(totals[i % 4], weights, ones);
      store_as(panel + j * PANEL + 2 * (lane % PANEL), weights);
    }
  }
  store(t.part.total + lane, load(t.part.total + lane) + ((totals[0] + totals[1]) + (totals[2] + totals[3])));
}

}  // namespace
}  // namespace headrace

#endif
