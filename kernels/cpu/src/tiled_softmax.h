// Online softmax of attention tiles: scores of a block -> weights, and sums kept relative to a reference that rarely moves.
// Included by tiled.cpp alone.
#pragma once

#include "half_softmax.h"

namespace headrace {
namespace {

template <class E>
float* scores_of(const Tile<E>& t, int64_t band) {
  return t.scores + band % 2 * KEY_BLOCK * BAND;
}

// Masks and scales the scores of VL query rows, and moves their reference where it must: what was gathered before is then
// to be multiplied with `factor`. Returns whether any has moved.
template <class E, bool MASKED>
bool find_reference(const Tile<E>& t, float* scores, int64_t first, int64_t lane, float scale, vf& factor) {
#if HR_HALF_WEIGHTS
  if constexpr (sizeof(E) == 2) return find_half_reference<MASKED>(t, scores, first, lane, scale, factor);
#endif
  const vi seen = load_as<vi>(t.seen + lane) - int32_t(first);
  vf highest[4] = {splat(FLOOR), splat(FLOOR), splat(FLOOR), splat(FLOOR)};
  for (int64_t j = 0; j < KEY_BLOCK; j += 4) {
    for (int i = 0; i < 4; ++i) {
      vf score = load(scores + (j + i) * BAND);
      if constexpr (MASKED) score = seen > int32_t(j + i) ? score : splat(FLOOR);
      if constexpr (MASKED) store(scores + (j + i) * BAND, score);
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
template <class E, bool MASKED, class F>
inline void exponentials(const Tile<E>& t, const float* scores, int64_t first, int64_t lane, float scale, E* panel,
                         F&& between) {
#if HR_HALF_WEIGHTS
  if constexpr (sizeof(E) == 2) return half_exponentials<MASKED>(t, scores, first, lane, scale, panel, between);
#endif
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
      store_weights(a, b, j, lane % PANEL, panel);
    }
  }
  store(t.part.total + lane, load(t.part.total + lane) + (even + odd));
}

template <class E, bool MASKED>
void soften_lanes(const Tile<E>& t, float* scores, int64_t first, int64_t lane, float scale) {
  vf factor;
  scores += lane % BAND;
  if (find_reference<E, MASKED>(t, scores, first, lane, scale, factor)) rescale(t, lane, factor);
  E* const panel = t.weights + lane % BAND / PANEL * PANEL * KEY_BLOCK;
  exponentials<E, MASKED>(t, scores, first, lane, scale, panel, [](int64_t) {});
}

template <class E>
void soften_band(const Tile<E>& t, int64_t first, int64_t band, float scale) {
  const auto [begin, end] = panels_of(t, band);
  const bool masked = t.seen[begin * PANEL] < first + KEY_BLOCK;
  const auto run = masked ? soften_lanes<E, true> : soften_lanes<E, false>;
  for (int64_t lane = begin * PANEL; lane < end * PANEL; lane += VL) {
    run(t, scores_of(t, band), first, lane, scale);
  }
}

}  // namespace
}  // namespace headrace
