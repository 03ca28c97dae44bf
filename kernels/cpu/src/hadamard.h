// The rotation in front of int8: every block of a row's depth is multiplied by a Hadamard matrix over the square root of
// its size, so a few large activations spread over the whole block, and one scale a row is enough for 8 bits. Weights
// were rotated alike when they were packed; the products do not change (QuaRot: Ashkboos et al. 2024).
#pragma once

#include "simd.h"

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

// One stage between values `span` apart, or two at once where there are two left: memory is passed over half as often.
inline void rotate_pairs(float* x, int64_t block, int64_t span) {
  for (int64_t i = 0; i < block; i += 2 * span) {
    for (int64_t j = i; j < i + span; j += VL) {
      const vf a = load(x + j), b = load(x + j + span);
      store(x + j, a + b);
      store(x + j + span, a - b);
    }
  }
}
inline void rotate_fours(float* x, int64_t block, int64_t span) {
  for (int64_t i = 0; i < block; i += 4 * span) {
    for (int64_t j = i; j < i + span; j += VL) {
      const vf a = load(x + j), b = load(x + j + span), c = load(x + j + 2 * span), d = load(x + j + 3 * span);
      const vf ab = a + b, ba = a - b, cd = c + d, dc = c - d;
      store(x + j, ab + cd);
      store(x + j + span, ba + dc);
      store(x + j + 2 * span, ab - cd);
      store(x + j + 3 * span, ba - dc);
    }
  }
}

// In place, and its own inverse.
inline void rotate_row(float* row, int64_t padded) {
  const int64_t block = rotation_block(padded);
  const float factor = 1.0f / std::sqrt(float(block));
  for (float* x = row; x < row + padded; x += block) {
    for (int64_t i = 0; i < block; i += VL) store(x + i, rotate_lanes(load(x + i) * factor));
    int64_t span = VL;
    for (; span * 4 <= block; span *= 4) rotate_fours(x, block, span);
    if (span < block) rotate_pairs(x, block, span);
  }
}

}  // namespace headrace
