// Rows of A as a linear layer wants them: float32, bf16, or int8 quantized on the fly, padded with zeros to the packed
// depth and to whole tiles of rows. INT8_ROW is rotated (hadamard.h) and has one scale a row, INT8_GROUP one a group.
#pragma once

#include "hadamard.h"
#include "weights.h"

namespace headrace {

enum class Act { F32, BF16, INT8_ROW, INT8_GROUP };

struct Activations {
  Act kind;
  int64_t depth;
  int64_t padded;
  uint8_t* data;
  int64_t ld;       // bytes from row to row
  float* scales;    // INT8_ROW: [rows]; INT8_GROUP: [rows][groups]
  int32_t* sums;    // of the int8 values, laid out like scales: they cancel the weights' offset

  int64_t groups() const { return padded / GROUP; }
  uint8_t* row(int64_t r) const { return data + r * ld; }
};

inline int64_t element_bytes(Act kind) { return kind == Act::F32 ? 4 : kind == Act::BF16 ? 2 : 1; }

// Rows up to which grouped weights are multiplied as they are. Beyond, unpacking a panel once and using the matrix
// unit on it costs less.
#if defined(__AMX_BF16__)
constexpr int64_t GROUPED_DIRECT_ROWS = 12;
#else
constexpr int64_t GROUPED_DIRECT_ROWS = 24;
#endif

// invariant: the same whatever the number of rows.
inline Act act_kind(int64_t format, int64_t rows, bool invariant) {
  if (format == HR_W_F32) return Act::F32;
  if (format == HR_W_BF16) return Act::BF16;
  if (format == HR_W_INT8) return Act::INT8_ROW;
  if (invariant || rows <= GROUPED_DIRECT_ROWS) return Act::INT8_GROUP;
  return HAS_BF16_DOT ? Act::BF16 : Act::F32;
}

inline int64_t act_stride(Act kind, int64_t padded) {
  const int64_t bytes = padded * element_bytes(kind);
  // Rows a multiple of 1 KiB apart share few cache sets, and a tile reads 16 of them at once.
  return bytes % 1024 == 0 ? bytes + 64 : bytes;
}

// Nearest integers of x, which are in int8's range, also stored as such.
inline vi store_rounded(vf x, int8_t* out) {
#if defined(__AVX512F__)
  const __m512i q = _mm512_cvtps_epi32((__m512)x);
  _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(q));
  return (vi)q;
#else
  typedef int8_t vb __attribute__((vector_size(VL)));
  const vi q = __builtin_convertvector(round_even(x), vi);
  store_as(out, __builtin_convertvector(q, vb));
  return q;
#endif
}

inline int32_t quantize_span(const float* x, int64_t count, float inverse, int8_t* out) {
  vi sum = {};
  for (int64_t i = 0; i < count; i += VL) sum += store_rounded(load(x + i) * inverse, out + i);
  int32_t total = 0;
  for (int i = 0; i < VL; ++i) total += sum[i];
  return total;
}

// NaN where there is one: as integers, magnitudes have the same order, and NaN is above all. Then the scale is NaN too,
// and so is everything computed from the row. count: a multiple of 32, for two chains of maxima side by side.
inline float largest_magnitude(const float* x, int64_t count) {
  const auto larger = [](vi a, vi b) { return a > b ? a : b; };
  vi even = {}, odd = {};
  for (int64_t i = 0; i < count; i += 2 * VL) {
    even = larger(even, (vi)vabs(load(x + i)));
    odd = larger(odd, (vi)vabs(load(x + i + VL)));
  }
  const vi both = larger(even, odd);
  int32_t most = both[0];
  for (int i = 1; i < VL; ++i) most = both[i] > most ? both[i] : most;
  float largest;
  std::memcpy(&largest, &most, 4);
  return largest;
}

// Stores one row given as float32 [padded], zeros past depth. May use x up.
inline void write_row(const Activations& to, int64_t r, float* x) {
  uint8_t* out = to.row(r);
  switch (to.kind) {
    case Act::F32:
      std::memcpy(out, x, to.padded * 4);
      return;
    case Act::BF16:
      for (int64_t i = 0; i < to.padded; i += VL) store((bf16*)out + i, load(x + i));
      return;
    case Act::INT8_ROW:
      rotate_row(x, to.padded);
      break;
    case Act::INT8_GROUP:
      break;
  }
  const int64_t span = to.kind == Act::INT8_ROW ? to.padded : GROUP, count = to.padded / span;
  for (int64_t s = 0; s < count; ++s) {
    const float largest = largest_magnitude(x + s * span, span);
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    to.scales[r * count + s] = largest / 127.0f;
    to.sums[r * count + s] = quantize_span(x + s * span, span, inverse, (int8_t*)out + s * span);
  }
}

// row[i] = x[i] as float32, zero from depth to padded.
template <class T>
inline void widen_row(const T* x, int64_t depth, int64_t padded, float* row) {
  for (int64_t i = 0; i < depth; i += VL) store(row + i, load_upto(x + i, depth - i));
  const int64_t end = round_up(depth, VL);
  if (end < padded) std::memset(row + end, 0, (padded - end) * 4);
}

}  // namespace headrace
