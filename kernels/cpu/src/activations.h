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

// x * inverse -> int8, which it is in the range of; returns their sum. count: a multiple of GROUP.
inline int32_t quantize_span(const float* x, int64_t count, float inverse, int8_t* out) {
  vi sum = {};
  int64_t i = 0;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  // Four vectors at a time: packing works on quarters of them, which have to be put in order afterwards.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (; i + 4 * VL <= count; i += 4 * VL) {
    __m512i q[4];
    for (int p = 0; p < 4; ++p) q[p] = _mm512_cvtps_epi32((__m512)(load(x + i + p * VL) * inverse));
    const __m512i low = _mm512_packs_epi32(q[0], q[1]), high = _mm512_packs_epi32(q[2], q[3]);
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    store_as(out + i, bytes);
    sum = dot4(sum, splat(0x01010101u), (vu)bytes);
  }
#endif
  for (; i < count; i += VL) sum += store_rounded(load(x + i) * inverse, out + i);
  return sum_lanes(sum);
}

// Stores one row whose VL values from i on are from(i), zero past depth. `from` may read scratch[i …], floats [padded].
template <class F>
inline void write_row(const Activations& to, int64_t r, float* scratch, F&& from) {
  uint8_t* out = to.row(r);
  const auto quantize = [&](int64_t at, int64_t span, float largest, int64_t place) {
    // NaN stays NaN: then the scale is, and so is everything computed from the row.
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    to.scales[place] = largest / 127.0f;
    to.sums[place] = quantize_span(scratch + at, span, inverse, (int8_t*)out + at);
  };
  switch (to.kind) {
    case Act::F32:
      for (int64_t i = 0; i < to.padded; i += VL) store_upto((float*)out + i, from(i), to.padded - i);
      return;
    case Act::BF16:
      for (int64_t i = 0; i < to.padded; i += VL) store_upto((bf16*)out + i, from(i), to.padded - i);
      return;
    case Act::INT8_ROW:
      quantize(0, to.padded, rotate_row(from, scratch, to.padded), r);
      return;
    case Act::INT8_GROUP:
      for (int64_t i = 0; i < to.padded; i += VL) store(scratch + i, from(i));
      for (int64_t group = 0; group < to.groups(); ++group) {
        Largest largest;
        for (int64_t i = 0; i < GROUP; i += VL) largest.take(load(scratch + group * GROUP + i), 0);
        quantize(group * GROUP, GROUP, largest.value(), r * to.groups() + group);
      }
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
