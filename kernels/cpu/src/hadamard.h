// The rotation in front of int8: every block of a row's depth is multiplied by a Hadamard matrix over the square root of
// its size, so a few large activations spread over the whole block, and one scale a row is enough for 8 bits. Weights
// were rotated alike when they were packed; the products do not change (QuaRot: Ashkboos et al. 2024).
#pragma once

#include "vmath.h"

namespace headrace {

constexpr int64_t MAX_ROTATION = 512;

// Size of the blocks: a power of two that divides the padded depth, hence at least DEPTH_ALIGN.
inline int64_t rotation_block(int64_t padded) {
  const int64_t power = padded & -padded;
  return power < MAX_ROTATION ? power : MAX_ROTATION;
}

template <int D, int... I>
inline vf rotate_step(vf v, std::integer_sequence<int, I...>) {
  const vf sign = {((I & D) ? -1.0f : 1.0f)...};
  return v * sign + __builtin_shufflevector(v, v, (I ^ D)...);
}

template <int D = 1>
inline vf rotate_lanes(vf v) {
  if constexpr (D == VL) {
    return v;
  } else {
    return rotate_lanes<2 * D>(rotate_step<D>(v, Lanes{}));
  }
}

// Two stages at once, between vectors.
inline void rotate_fours(vf* v) {
  const vf ab = v[0] + v[1], ba = v[0] - v[1], cd = v[2] + v[3], dc = v[2] - v[3];
  v[0] = ab + cd;
  v[1] = ba + dc;
  v[2] = ab - cd;
  v[3] = ba - dc;
}

// The largest magnitude of what it is shown, NaN where there is one: as integers, magnitudes have the same order, and NaN is
// above all.
class Largest {
 public:
  // Vector p of four, for four chains of maxima.
  void take(vf v, int p) {
    most_[p] = vmax((vi)vabs(v), most_[p]);
  }
  void take(const vf* v) {
    for (int p = 0; p < 4; ++p) take(v[p], p);
  }

  float value() const {
    const int32_t bits = max_lanes(vmax(vmax(most_[0], most_[1]), vmax(most_[2], most_[3])));
    float largest;
    std::memcpy(&largest, &bits, 4);
    return largest;
  }

 private:
  vi most_[4] = {};
};

// Rotates a row whose VL values from i on are from(i), into row [padded]; returns the largest magnitude. Its own inverse;
// `from` may read row[i …] itself. Memory is passed over once for every two stages.
template <class F>
inline float rotate_row(F&& from, float* row, int64_t padded) {
  const int64_t block = rotation_block(padded);
  const float factor = 1.0f / std::sqrt(float(block));
  Largest largest;
  vf v[4];
  for (int64_t start = 0; start < padded; start += block) {
    float* const x = row + start;
    for (int64_t i = 0; i < block; i += 4 * VL) {
      for (int p = 0; p < 4; ++p) v[p] = rotate_lanes(from(start + i + p * VL) * factor);
      rotate_fours(v);
      for (int p = 0; p < 4; ++p) store(x + i + p * VL, v[p]);
      if (block == 4 * VL) largest.take(v);
    }
    int64_t span = 4 * VL;
    for (; span * 4 <= block; span *= 4) {
      for (int64_t i = 0; i < block; i += i % span + VL == span ? 3 * span + VL : VL) {
        for (int p = 0; p < 4; ++p) v[p] = load(x + i + p * span);
        rotate_fours(v);
        for (int p = 0; p < 4; ++p) store(x + i + p * span, v[p]);
        if (span * 4 == block) largest.take(v);
      }
    }
    for (int64_t i = 0; span < block && i < block; i += i % span + 2 * VL == span ? span + 2 * VL : 2 * VL) {
      for (int p = 0; p < 2; ++p) {
        const vf a = load(x + i + p * VL), b = load(x + i + p * VL + span);
        store(x + i + p * VL, v[2 * p] = a + b);
        store(x + i + p * VL + span, v[2 * p + 1] = a - b);
      }
      largest.take(v);
    }
  }
  return largest.value();
}

inline float rotate_row(float* row, int64_t padded) {
  return rotate_row([&](int64_t i) { return load(row + i); }, row, padded);
}

}  // namespace headrace
