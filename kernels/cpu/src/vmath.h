// Functions of whole vectors: rounding, powers and reciprocals, each as exact as its name says. Coarse and fast ones are for
// results that are rounded to bf16.
#pragma once

#include "simd.h"

namespace headrace {

inline vf round_even(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // Adding 1.5 * 2^23 leaves no fraction bits; right for |x| < 2^22, and callers clamp far below.
  const vf magic = splat(12582912.0f);
  return (x + magic) - magic;
#endif
}

// 2^whole * fraction for integral whole in [-126, 127].
inline vf scale_by_power(vf fraction, vf whole) {
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)fraction, (__m512)whole);
#else
  return (vf)((vi)fraction + (__builtin_convertvector(whole, vi) << 23));
#endif
}

constexpr float LOG2_E = 1.44269504088896341f;

// e^x within 2 ulp for x in [-87, 88]; below it is 0 (or a denormal), above it saturates. Cephes' expf polynomial.
inline vf vexp(vf x) {
  const vf low = splat(-87.3f);
  vi tiny = x < low;
  x = vmax(low, x);  // in this order NaN stays NaN
  x = -vmax(splat(-88.0f), -x);
  vf n = round_even(x * LOG2_E);
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (vf)((vi)scale_by_power(p, n) & ~tiny);
}

// 1 / x within 1e-4.
inline vf reciprocal_coarse(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_rcp14_ps((__m512)x);
#else
  return 1.0f / x;
#endif
}

// 2^x within 1e-4, for x >= -125 (and below 128 but on AVX-512): enough where the result is rounded to bf16, which has 8
// bits of mantissa.
inline vf vexp2_coarse(vf x) {
  const vf n = round_even(x), r = x - n;
  vf p = splat(0.05517167f);
  p = p * r + 0.24261113f;
  p = p * r + 0.69326099f;
  p = p * r + 0.99992807f;
  return scale_by_power(p, n);
}

// The same for x <= 128, without the instructions that round and scale: two fewer, and any port takes most. -125 and
// below give 2^-125.
inline vf vexp2_fast(vf x) {
  // Adding 1.5 * 2^23 leaves the integer in the last bits.
  const vf magic = splat(12582912.0f);
  x = vmax(splat(-125.0f), x);  // in this order NaN stays NaN
  const vf shifted = x + magic, r = x - (shifted - magic);
  vf p = splat(0.05517167f);
  p = p * r + 0.24261113f;
  p = p * r + 0.69326099f;
  p = p * r + 0.99992807f;
  return (vf)((vi)p + ((vi)shifted << 23));
}

// e^x for |x| < 88 within 1e-4, saturating beyond.
inline vf vexp_coarse(vf x) {
#if defined(__AVX512F__)
  return vexp2_coarse(x * LOG2_E);  // its instructions saturate, for all that is finite
#else
  return vexp2_coarse(vmax(-vmax(x * -LOG2_E, splat(-127.0f)), splat(-125.0f)));
#endif
}

}  // namespace headrace
