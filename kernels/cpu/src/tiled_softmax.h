// Online softmax of attention tiles: scores of a block -> weights, and sums kept relative to a reference that rarely moves.
// Included by tiled.cpp alone.
#pragma once

#include "tiled.h"

namespace headrace {
namespace {

template <class E>
float* scores_of(const Tile<E>& t, int64_t band) {
  return t.scores + band % 2 * KEY_BLOCK * BAND;
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

}  // namespace
}  // namespace headrace
