// Packed weights back to numbers: whole panels for the matrix unit, single features for embeddings.
#include "hadamard.h"
#include "weights.h"

namespace headrace {
namespace {

// Where a grouped panel keeps what.
struct GroupedPanel {
  const uint16_t* scales;  // [groups][16]
  const uint16_t* minima;  // alike; Q4_1 only
  const uint8_t* codes;
  int64_t groups;
  bool nibbles;
  bool has_minima;

  GroupedPanel(const HrLinear& w, int64_t panel) {
    nibbles = w.format != HR_W_Q8_0;
    has_minima = w.format == HR_W_Q4_1;
    groups = padded_depth(w.in_features) / GROUP;
    const uint8_t* base = panel_of(w, panel);
    scales = (const uint16_t*)base;
    minima = scales + groups * PANEL;
    codes = base + scale_bytes(w.in_features) * (has_minima ? 2 : 1);
  }

  // What a code of zero is worth, in scales.
  float zero() const { return nibbles ? -8.0f : -float(INT8_OFFSET); }
};

float half_to_float(uint16_t half) {
  uint16_t lanes[VL] = {half};
  return load_half(lanes)[0];
}

// Two float32 vectors -> one of bf16 pairs. Weights are finite, so NaN needs no care.
inline vu pair_bf16(vf even, vf odd) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  static constexpr struct Order {
    uint16_t at[32];
    constexpr Order() : at() {
      for (int i = 0; i < 16; ++i) {
        at[2 * i] = uint16_t(i);
        at[2 * i + 1] = uint16_t(16 + i);
      }
    }
  } ORDER;
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (vu)_mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER.at), both);
#else
  const auto rounded = [](vf v) { return (vu)v + 0x7fffu + (((vu)v >> 16) & 1u); };
  return (rounded(even) >> 16) | (rounded(odd) & 0xffff0000u);
#endif
}

// Code b of each lane as float32: bytes, or nibbles that are the low half of each byte.
template <bool NIBBLES>
inline vf code(vu w, int b) {
#if defined(__AVX512F__)
  // The permutation looks at four bits of each lane, so it masks, converts and costs one instruction.
  static constexpr float VALUES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  if constexpr (NIBBLES) return (vf)_mm512_permutexvar_ps((__m512i)(w >> (8 * b)), _mm512_loadu_ps(VALUES));
#endif
  return __builtin_convertvector((vi)((w >> (8 * b)) & (NIBBLES ? 15u : 255u)), vf);
}

template <bool NIBBLES, bool F32>
void unpack_steps(const GroupedPanel& from, uint8_t* dst, const uint8_t* ahead) {
  constexpr int STORED = NIBBLES ? 4 : 8;
  for (int64_t g = 0; g < from.groups; ++g) {
    for (int s = 0; s < STORED; ++s) __builtin_prefetch(ahead + (g * STORED + s) * STEP_BYTES, 0, 2);
    for (int part = 0; part < PANEL; part += VL) {
      const vf scale = load_half(from.scales + g * PANEL + part);
      const vf minimum = from.has_minima ? load_half(from.minima + g * PANEL + part) : scale * from.zero();
      for (int s = 0; s < 8; ++s) {
        vu w = load_as<vu>(from.codes + (g * STORED + s % STORED) * STEP_BYTES + part * 4);
        if (NIBBLES && s >= 4) w = w >> 4;
        vf value[4];
        for (int b = 0; b < 4; ++b) value[b] = code<NIBBLES>(w, b) * scale + minimum;
        const int64_t k = g * GROUP + s * 4;
        for (int b = 0; b < 4; b += F32 ? 1 : 2) {
          if constexpr (F32) {
            store_as(dst + (k + b) * STEP_BYTES + part * 4, value[b]);
          } else {
            store_as(dst + (k + b) / 2 * STEP_BYTES + part * 4, pair_bf16(value[b], value[b + 1]));
          }
        }
      }
    }
  }
}

void unpack_grouped_row(const HrLinear& w, int64_t panel, int64_t lane, float* row) {
  const GroupedPanel from(w, panel);
  for (int64_t g = 0; g < from.groups; ++g) {
    const float scale = half_to_float(from.scales[g * PANEL + lane]);
    const float minimum = from.has_minima ? half_to_float(from.minima[g * PANEL + lane]) : scale * from.zero();
    for (int k = 0; k < GROUP; ++k) {
      const int step = from.nibbles ? k / 4 % 4 : k / 4;
      const uint8_t byte = from.codes[(g * (from.nibbles ? 4 : 8) + step) * STEP_BYTES + lane * 4 + k % 4];
      const int value = !from.nibbles ? byte : k < 16 ? byte & 15 : byte >> 4;
      row[g * GROUP + k] = float(value) * scale + minimum;
    }
  }
}

}  // namespace

void unpack_row(const HrLinear& w, int64_t feature, float* row) {
  const int64_t panel = feature / PANEL, lane = feature % PANEL, padded = padded_depth(w.in_features);
  const uint8_t* from = panel_of(w, panel);
  switch (w.format) {
    case HR_W_F32:
      for (int64_t k = 0; k < padded; ++k) row[k] = ((const float*)from)[k * PANEL + lane];
      return;
    case HR_W_BF16:
      for (int64_t k = 0; k < padded; ++k) row[k] = widen(((const bf16*)from)[(k / 2 * PANEL + lane) * 2 + k % 2]);
      return;
    case HR_W_INT8: {
      const float scale = int8_scales(w)[feature];
      for (int64_t k = 0; k < padded; ++k) {
        row[k] = float(int(from[(k / 4 * PANEL + lane) * 4 + k % 4]) - INT8_OFFSET) * scale;
      }
      rotate_row(row, padded);
      return;
    }
    default:
      unpack_grouped_row(w, panel, lane, row);
  }
}

void unpack_panel(const HrLinear& w, int64_t panel, Product product, uint8_t* dst, const uint8_t* ahead) {
  const GroupedPanel from(w, panel);
  const bool wide = product == Product::F32;
  const auto run = from.nibbles ? (wide ? unpack_steps<true, true> : unpack_steps<true, false>)
                                : (wide ? unpack_steps<false, true> : unpack_steps<false, false>);
  run(from, dst, ahead);
}

}  // namespace headrace
