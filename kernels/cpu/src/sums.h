// What becomes of a block of sums: scaled where they are int8's, then stored, gated, or looked through for each row's
// largest. Included by gemm.cpp alone.
#pragma once

#include "gemm.h"

namespace headrace {
namespace {

struct Gemm {
  const HrLinear& w;
  const Activations& x;
  int64_t rows;
  const Output& out;
  bool gated;
  const Logits* logits = nullptr;
};

// Sums of a block of rows that are to be stored; of int8 they still are int32.
struct Sums {
  const Gemm& g;
  int rank;
  const int64_t* panels;
  int count;
  const float* tile;
  int64_t row;  // the block's first
  int64_t rows;

  int64_t column(int p, int v) const { return panels[p] * PANEL + v; }
};

// VL features of all rows: those from feature v of panel p on. INT8: scaled.
template <bool INT8>
class Features {
 public:
  Features(const Sums& sums, int p, int v) : at_(sums.tile + p * PANEL + v) {
    const int64_t column = sums.column(p, v), left = sums.g.w.out_features - column;
    if (sums.g.w.bias && left > 0) bias_ = load_upto(sums.g.w.bias + column, left);
    if constexpr (INT8) {
      scale_ = load(int8_scales(sums.g.w) + column);
      row_scales_ = sums.g.x.scales + sums.row;
      row_sums_ = sums.g.x.sums + sums.row;
    }
  }

  vf of(int64_t r) const {
    const float* at = at_ + r * TILE_LD;
    if constexpr (!INT8) return load(at) + bias_;
    const vi exact = load_as<vi>(at) - INT8_OFFSET * splat(row_sums_[r]);
    return __builtin_convertvector(exact, vf) * (scale_ * row_scales_[r]) + bias_;
  }

 private:
  const float* at_;
  vf bias_ = {};
  vf scale_ = {};
  const float* row_scales_ = nullptr;
  const int32_t* row_sums_ = nullptr;
};

template <class T, bool INT8>
void store_plain(const Sums& sums) {
  const int64_t ld = sums.g.out.ld;
  for (int p = 0; p < sums.count; ++p) {
    for (int v = 0; v < PANEL; v += VL) {
      const Features<INT8> features(sums, p, v);
      const int64_t column = sums.column(p, v), left = sums.g.w.out_features - column;
      T* out = (T*)sums.g.out.data + sums.row * ld + column;
      if (left >= VL) {
        for (int64_t r = 0; r < sums.rows; ++r, out += ld) store(out, features.of(r));
      } else if (left > 0) {
        for (int64_t r = 0; r < sums.rows; ++r, out += ld) store_part(out, features.of(r), left);
      }
    }
  }
}

template <class T, bool INT8>
void store_gated(const Sums& sums) {
  const int64_t ld = sums.g.out.ld;
  const int gates = sums.count / 2;
  for (int p = 0; p < gates; ++p) {
    for (int v = 0; v < PANEL; v += VL) {
      const Features<INT8> gate(sums, p, v), up(sums, gates + p, v);
      T* out = (T*)sums.g.out.data + sums.row * ld + sums.column(p, v);
      for (int64_t r = 0; r < sums.rows; ++r, out += ld) store(out, silu_mul(gate.of(r), up.of(r), out));
    }
  }
}

template <bool INT8>
void store_logits(const Sums& sums) {
  const Logits& to = *sums.g.logits;
  const int64_t features = sums.g.w.out_features;
  for (int p = 0; p < sums.count; ++p) {
    for (int v = 0; v < PANEL; v += VL) {
      const Features<INT8> logits(sums, p, v);
      const int64_t column = sums.column(p, v), left = features - column;
      if (left <= 0) return;
      for (int64_t r = 0; r < sums.rows; ++r) {
        const int64_t row = sums.row + r, line = !to.data ? -1 : to.lines ? to.lines[row] : row;
        vf value = logits.of(r);
        if (line >= 0) store_upto(to.data + line * features + column, value, left);
        for (int64_t i = left; i < VL; ++i) value[i] = -INFINITY;
        Best::take(to.best.of(sums.rank, row), value, int32_t(column));
      }
    }
  }
}

void store_sums(const Sums& sums) {
  const Gemm& g = sums.g;
  const bool int8 = g.x.kind == Act::INT8_ROW, wide = g.out.dtype == HR_F32;
  const auto run = g.logits  ? (int8 ? store_logits<true> : store_logits<false>)
                   : g.gated ? (int8   ? (wide ? store_gated<float, true> : store_gated<bf16, true>)
                                : wide ? store_gated<float, false>
                                       : store_gated<bf16, false>)
                   : int8    ? (wide ? store_plain<float, true> : store_plain<bf16, true>)
                   : wide    ? store_plain<float, false>
                             : store_plain<bf16, false>;
  run(sums);
}

}  // namespace
}  // namespace headrace
