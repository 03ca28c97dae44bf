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

// In place, and its own inverse. Memory is passed over once for every two stages.
inline void rotate_row(float* row, int64_t padded) {
  const int64_t block = rotation_block(padded);
  const float factor = 1.0f / std::sqrt(float(block));
  vf v[4];
  for (float* x = row; x < row + padded; x += block) {
    for (int64_t i = 0; i < block; i += 4 * VL) {
      for (int p = 0; p < 4; ++p) v[p] = rotate_lanes(load(x + i + p * VL) * factor);
      rotate_fours(v);
      for (int p = 0; p < 4; ++p) store(x + i + p * VL, v[p]);
    }
    int64_t span = 4 * VL;
    for (; span * 4 <= block; span *= 4) {
      for (int64_t i = 0; i < block; i += i % span + VL == span ? 3 * span + VL : VL) {
        for (int p = 0; p < 4; ++p) v[p] = load(x + i + p * span);
        rotate_fours(v);
        for (int p = 0; p < 4; ++p) store(x + i + p * span, v[p]);
      }
    }
    for (int64_t i = 0; span < block && i < block; i += i % span + VL == span ? span + VL : VL) {
      const vf a = load(x + i), b = load(x + i + span);
      store(x + i, a + b);
      store(x + i + span, a - b);
    }
  }
}

}  // namespace headrace
