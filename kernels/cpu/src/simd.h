// Vectors of the width this build was compiled for, on GCC's vector extension: one source serves AVX-512, AVX2 and
// anything else. Only what the extension cannot express well (bf16 and int8 dot products, min/max, exponent scaling)
// falls back on intrinsics.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

// Storage type only: all arithmetic is float32.
struct bf16 {
  uint16_t bits;
};

#if defined(__AVX512BF16__)
constexpr bool HAS_BF16_DOT = true;
#else
constexpr bool HAS_BF16_DOT = false;
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
constexpr bool HAS_AMX = true;
#else
constexpr bool HAS_AMX = false;
#endif

template <class V, class T>
inline V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
inline void store_as(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// x - 0 folds to a plain broadcast; 0 + x would not (negative zero).
inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }
inline vu splat(uint32_t x) { return x - vu{}; }

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bf16{uint16_t((bits >> 16) | 0x40)};
  return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline void narrow_to(float x, bf16* p) { *p = narrow(x); }
inline void narrow_to(float x, float* p) { *p = x; }

inline vf load(const float* p) { return load_as<vf>(p); }
inline vf load(const bf16* p) {
  return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
}

// GCC 12 widens bytes one by one where it is not told the instruction.
inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef int8_t vb __attribute__((vector_size(VL)));
  return __builtin_convertvector(__builtin_convertvector(load_as<vb>(p), vi), vf);
#endif
}

inline void store(float* p, vf v) { store_as(p, v); }
inline void store(bf16* p, vf v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vu nan = (vu)(v != v);
  store_as(p, __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40) & nan), vh));
#endif
}

// The first n < VL elements; the rest reads as zero and is not written.
template <class T>
inline vf load_part(const T* p, int64_t n) {
  float lanes[VL] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = widen(p[i]);
  return load(lanes);
}
template <class T>
inline void store_part(T* p, vf v, int64_t n) {
  float lanes[VL];
  store(lanes, v);
  for (int64_t i = 0; i < n; ++i) narrow_to(lanes[i], p + i);
}

template <class T>
inline vf load_upto(const T* p, int64_t n) {
  return n >= VL ? load(p) : load_part(p, n);
}
template <class T>
inline void store_upto(T* p, vf v, int64_t n) {
  if (n >= VL) {
    store(p, v);
  } else {
    store_part(p, v, n);
  }
}

// VL elements from `at` of a row of `dim`, zero past its end.
template <class T>
inline vf load_from(const T* row, int64_t at, int64_t dim) {
  return at < dim ? load_upto(row + at, dim - at) : vf{};
}

inline vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline vi vmax(vi a, vi b) { return a > b ? a : b; }

inline vf vabs(vf a) { return (vf)((vu)a & 0x7fffffffu); }

// acc + a pair of bf16 products a lane: x and w hold two bf16 in each 32-bit lane.
inline vf dot2(vf acc, vu x, vu w) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
  acc += (vf)(x << 16) * (vf)(w << 16);
  return acc + (vf)(x & 0xffff0000u) * (vf)(w & 0xffff0000u);
#endif
}

// acc + four byte products a lane: w unsigned, x signed. Exact on every path (no 16-bit saturation).
inline vi dot4(vi acc, vu w, vu x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
  const __m512i low = _mm512_set1_epi16(0xff), wv = (__m512i)w, xv = (__m512i)x;
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(wv, low), _mm512_srai_epi16(_mm512_slli_epi16(xv, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(wv, 8), _mm512_srai_epi16(xv, 8));
  return acc + (vi)even + (vi)odd;
#elif defined(__AVX2__)
  const __m256i low = _mm256_set1_epi16(0xff), wv = (__m256i)w, xv = (__m256i)x;
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(wv, low), _mm256_srai_epi16(_mm256_slli_epi16(xv, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(wv, 8), _mm256_srai_epi16(xv, 8));
  return acc + (vi)even + (vi)odd;
#elif defined(__SSE2__)
  const __m128i low = _mm_set1_epi16(0xff), wv = (__m128i)w, xv = (__m128i)x;
  __m128i even = _mm_madd_epi16(_mm_and_si128(wv, low), _mm_srai_epi16(_mm_slli_epi16(xv, 8), 8));
  __m128i odd = _mm_madd_epi16(_mm_srli_epi16(wv, 8), _mm_srai_epi16(xv, 8));
  return acc + (vi)even + (vi)odd;
#else
  for (int byte = 0; byte < 4; ++byte) acc += (vi)((w >> (8 * byte)) & 255u) * ((vi)(x << (24 - 8 * byte)) >> 24);
  return acc;
#endif
}

// Cross-lane steps of a butterfly: lanes pair up with the lane D further.
template <int D, class V, int... I>
inline V merge_low(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & D) ? VL + I - D : I)...);
}
template <int D, class V, int... I>
inline V merge_high(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & D) ? VL + I : I + D)...);
}
using Lanes = std::make_integer_sequence<int, VL>;

template <int D = VL / 2, class V>
inline auto sum_lanes(V v) {
  if constexpr (D == 0) {
    return v[0];
  } else {
    return sum_lanes<D / 2>(v + merge_high<D>(v, v, Lanes{}));
  }
}
template <int D = VL / 2, class V>
inline auto max_lanes(V v) {
  if constexpr (D == 0) {
    return v[0];
  } else {
    return max_lanes<D / 2>(vmax(v, merge_high<D>(v, v, Lanes{})));
  }
}

// rows[i] -> lane i of the result holds the sum over rows[i]'s lanes. Destroys rows.
template <int D = 1>
inline vf sum_each(vf* rows) {
  if constexpr (D == VL) {
    return rows[0];
  } else {
    for (int i = 0; i < VL; i += 2 * D) {
      rows[i] = merge_low<D>(rows[i], rows[i + D], Lanes{}) + merge_high<D>(rows[i], rows[i + D], Lanes{});
    }
    return sum_each<2 * D>(rows);
  }
}

// In-place transposition of a VL x VL block.
template <int D = 1>
inline void transpose(vu* rows) {
  if constexpr (D < VL) {
    for (int i = 0; i < VL; ++i) {
      if (i & D) continue;
      vu low = merge_low<D>(rows[i], rows[i + D], Lanes{});
      rows[i + D] = merge_high<D>(rows[i], rows[i + D], Lanes{});
      rows[i] = low;
    }
    transpose<2 * D>(rows);
  }
}

// Whether any lane of a comparison holds.
inline bool any_lane(vi v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)v) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < VL; ++i) any |= v[i];
  return any != 0;
#endif
}

}  // namespace headrace
