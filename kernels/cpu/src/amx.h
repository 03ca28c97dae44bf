// AMX tiles: 16 rows of A times 16 features in one instruction. team.h has configured every tile as 16 x 64 bytes, and
// vectors to flush denormals as tiles do.
#pragma once

#include "tile.h"

namespace headrace {

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

// 16 steps of a panel lie exactly as an operand tile.
constexpr int64_t AMX_TILE_BYTES = 16 * STEP_BYTES;

// Tile numbers must be literals: 0-3 accumulate, 4-5 hold A, 6-7 hold B.
#define HR_DOT(acc, a, b)          \
  if constexpr (INT8) {            \
    _tile_dpbsud(acc, a, b);       \
  } else {                         \
    _tile_dpbf16ps(acc, a, b);     \
  }

#define HR_LOAD_ROWS(tile, from)           \
  if constexpr (PASSING) {                 \
    _tile_stream_loadd(tile, from, lda);   \
  } else {                                 \
    _tile_loadd(tile, from, lda);          \
  }

// The share of a panel's weights that this job fetches for the next one, a few lines after every product: only so many
// lines can be on their way to the first-level cache, and more at once would hold up the tiles that come from the second.
class AmxFetch {
 public:
  AmxFetch() = default;
  // turns: how often `some` is called.
  AmxFetch(const TileJob& job, int panel, int64_t turns)
      : at_(job.panels[panel] + job.ahead + job.ahead_first * STEP_BYTES),
        lines_(job.ahead_last - job.ahead_first),
        turns_(turns) {}

  void some() {
    for (due_ += lines_; due_ >= turns_; due_ -= turns_, at_ += STEP_BYTES) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const uint8_t* at_ = nullptr;
  int64_t lines_ = 0;
  int64_t turns_ = 1;
  int64_t due_ = 0;
};

// Up to 16 rows by NB <= 4 panels.
template <bool INT8, int NB>
void amx_flat(const TileJob& job, int64_t row) {
  const uint8_t* a = job.a + row * job.lda;
  auto* c = (float*)job.c + row * job.ldc;
  const int64_t ldc = job.ldc * 4;
  if (job.accumulate) {
    _tile_loadd(0, c, ldc);
    if constexpr (NB > 1) _tile_loadd(1, c + 16, ldc);
    if constexpr (NB > 2) _tile_loadd(2, c + 32, ldc);
    if constexpr (NB > 3) _tile_loadd(3, c + 48, ldc);
  } else {
    _tile_zero(0);
    if constexpr (NB > 1) _tile_zero(1);
    if constexpr (NB > 2) _tile_zero(2);
    if constexpr (NB > 3) _tile_zero(3);
  }
  const int64_t tiles = job.steps / 16;
  AmxFetch fetch[NB];
  for (int n = 0; n < NB; ++n) fetch[n] = AmxFetch(job, n, tiles);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t at = t * AMX_TILE_BYTES;
    _tile_loadd(4, a + t * 64, job.lda);
    _tile_loadd(6, job.panels[0] + at, STEP_BYTES);
    HR_DOT(0, 4, 6)
    fetch[0].some();
    if constexpr (NB > 1) {
      _tile_loadd(7, job.panels[1] + at, STEP_BYTES);
      HR_DOT(1, 4, 7)
      fetch[1].some();
    }
    if constexpr (NB > 2) {
      _tile_loadd(6, job.panels[2] + at, STEP_BYTES);
      HR_DOT(2, 4, 6)
      fetch[2].some();
    }
    if constexpr (NB > 3) {
      _tile_loadd(7, job.panels[3] + at, STEP_BYTES);
      HR_DOT(3, 4, 7)
      fetch[3].some();
    }
  }
  _tile_stored(0, c, ldc);
  if constexpr (NB > 1) _tile_stored(1, c + 16, ldc);
  if constexpr (NB > 2) _tile_stored(2, c + 32, ldc);
  if constexpr (NB > 3) _tile_stored(3, c + 48, ldc);
}

// 32 rows by NB <= 2 panels: four products for four loads. PASSING: the panels are to stay in the first-level cache while
// rows pass by, so these are loaded with the hint that they will not be needed again.
template <bool INT8, int NB, bool PASSING>
void amx_square(const TileJob& job, int64_t row, int panel) {
  const int64_t tiles = job.steps / 16, lda = job.lda;  // locals: tile loads are barriers to GCC
  const uint8_t *a0 = job.a + row * job.lda, *a1 = a0 + 16 * job.lda;
  const uint8_t *b0 = job.panels[panel], *b1 = job.panels[NB > 1 ? panel + 1 : panel];
  auto *c0 = (float*)job.c + row * job.ldc + panel * PANEL, *c1 = c0 + 16 * job.ldc;
  const int64_t ldc = job.ldc * 4;
  if (job.accumulate) {
    _tile_loadd(0, c0, ldc);
    _tile_loadd(2, c1, ldc);
    if constexpr (NB > 1) _tile_loadd(1, c0 + 16, ldc);
    if constexpr (NB > 1) _tile_loadd(3, c1 + 16, ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  AmxFetch fetch0(job, panel, 2 * tiles), fetch1(job, NB > 1 ? panel + 1 : panel, 2 * tiles);
  for (int64_t t = 0; t < tiles; ++t) {
    HR_LOAD_ROWS(4, a0 + t * 64)
    _tile_loadd(6, b0 + t * AMX_TILE_BYTES, STEP_BYTES);
    HR_DOT(0, 4, 6)
    fetch0.some();
    HR_LOAD_ROWS(5, a1 + t * 64)
    HR_DOT(2, 5, 6)
    fetch0.some();
    if constexpr (NB > 1) {
      _tile_loadd(7, b1 + t * AMX_TILE_BYTES, STEP_BYTES);
      HR_DOT(1, 4, 7)
      fetch1.some();
      HR_DOT(3, 5, 7)
      fetch1.some();
    }
  }
  _tile_stored(0, c0, ldc);
  _tile_stored(2, c1, ldc);
  if constexpr (NB > 1) _tile_stored(1, c0 + 16, ldc);
  if constexpr (NB > 1) _tile_stored(3, c1 + 16, ldc);
}

#undef HR_DOT
#undef HR_LOAD_ROWS

template <bool INT8>
void amx_rows(const TileJob& job) {
  for (int64_t row = 0; row < job.rows; row += 32) {
    if (job.rows - row > 16) {
      int panel = 0;
      const auto two = job.passing ? amx_square<INT8, 2, true> : amx_square<INT8, 2, false>;
      for (; panel + 2 <= job.num_panels; panel += 2) two(job, row, panel);
      if (panel < job.num_panels) amx_square<INT8, 1, false>(job, row, panel);
      continue;
    }
    switch (job.num_panels) {
      case 1:
        amx_flat<INT8, 1>(job, row);
        break;
      case 2:
        amx_flat<INT8, 2>(job, row);
        break;
      case 3:
        amx_flat<INT8, 3>(job, row);
        break;
      default:
        amx_flat<INT8, 4>(job, row);
    }
  }
}

// MR rows by NB panels of bf16 without the matrix unit, bit for bit what it computes: products of even and of odd elements
// go to sums of their own, 16 steps long, and the two together to the result. For one or two rows it is all about memory,
// and plain loads stream a tenth faster than tile loads.
template <int MR, int NB>
void amx_by_vectors(const TileJob& job, int panel) {
  const vu high = splat(0xffff0000u);
  vf acc[MR][NB] = {};
  const auto at = [&](int m, int n) { return (float*)job.c + m * job.ldc + (panel + n) * PANEL; };
  if (job.accumulate) {
    for (int m = 0; m < MR; ++m) {
      for (int n = 0; n < NB; ++n) acc[m][n] = load(at(m, n));
    }
  }
  const int64_t tiles = job.steps / 16;
  AmxFetch fetch[NB];
  for (int n = 0; n < NB; ++n) fetch[n] = AmxFetch(job, panel + n, tiles);
  for (int64_t t = 0; t < tiles; ++t) {
    for (int n = 0; n < NB; ++n) fetch[n].some();
    vf even[MR][NB] = {}, odd[MR][NB] = {};
    for (int64_t s = t * 16; s < t * 16 + 16; ++s) {
      vf xe[MR], xo[MR];
      for (int m = 0; m < MR; ++m) {
        const vu x = splat(load_as<uint32_t>(job.a + m * job.lda + 4 * s));
        xe[m] = (vf)(x << 16);
        xo[m] = (vf)(x & high);
      }
      for (int n = 0; n < NB; ++n) {
        const vu w = load_as<vu>(job.panels[panel + n] + s * STEP_BYTES);
        const vf we = (vf)(w << 16), wo = (vf)(w & high);
        for (int m = 0; m < MR; ++m) {
          even[m][n] = (vf)_mm512_fmadd_ps((__m512)xe[m], (__m512)we, (__m512)even[m][n]);
          odd[m][n] = (vf)_mm512_fmadd_ps((__m512)xo[m], (__m512)wo, (__m512)odd[m][n]);
        }
      }
    }
    for (int m = 0; m < MR; ++m) {
      for (int n = 0; n < NB; ++n) acc[m][n] += even[m][n] + odd[m][n];
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int n = 0; n < NB; ++n) store(at(m, n), acc[m][n]);
  }
}

template <int MR>
void amx_few_rows(const TileJob& job) {
  int panel = 0;
  for (; panel + 4 <= job.num_panels; panel += 4) amx_by_vectors<MR, 4>(job, panel);
  for (; panel + 2 <= job.num_panels; panel += 2) amx_by_vectors<MR, 2>(job, panel);
  for (; panel < job.num_panels; ++panel) amx_by_vectors<MR, 1>(job, panel);
}

inline void amx_multiply(bool int8, const TileJob& job) {
  if (job.rows == 1 && !int8) return amx_few_rows<1>(job);
  if (job.rows == 2 && !int8) return amx_few_rows<2>(job);
  // GCC's tile loads do not say that they read memory: earlier stores must not move past them.
  __asm__ volatile("" ::: "memory");
  if (int8) {
    amx_rows<true>(job);
  } else {
    amx_rows<false>(job);
  }
}

#else

inline void amx_multiply(bool, const TileJob&) {}

#endif

}  // namespace headrace
