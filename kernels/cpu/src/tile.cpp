#include "tile.h"

#include <type_traits>

#include "amx.h"

namespace headrace {
namespace {

// Registers: accumulators MR * NB * (vectors a panel), the panel's vectors, one broadcast.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6, MAX_PANELS = 4;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 3, MAX_PANELS = 2;
#else
constexpr int MAX_ROWS = 3, MAX_PANELS = 1;
#endif
constexpr int PARTS = PANEL / VL;

struct F32 {
  using Acc = vf;
  static vf multiply(vf acc, vu x, vu w) { return acc + (vf)x * (vf)w; }
};
struct Bf16 {
  using Acc = vf;
  static vf multiply(vf acc, vu x, vu w) { return dot2(acc, x, w); }
};
struct Int8 {
  using Acc = vi;
  static vi multiply(vi acc, vu x, vu w) { return dot4(acc, w, x); }
};

template <class Op, int MR, int NB>
void micro(const TileJob& job, int64_t row, int panel) {
  using Acc = typename Op::Acc;
  const uint8_t* rows[MR];
  for (int m = 0; m < MR; ++m) rows[m] = job.a + (row + m) * job.lda;
  const uint8_t* panels[NB];
  for (int n = 0; n < NB; ++n) panels[n] = job.panels[panel + n];
  Acc acc[MR][NB][PARTS] = {};
  const auto run = [&](int64_t first, int64_t last, auto fetch) __attribute__((always_inline)) {
    for (int64_t s = first; s < last; ++s) {
      vu w[NB][PARTS];
      for (int n = 0; n < NB; ++n) {
        const uint8_t* step = panels[n] + s * STEP_BYTES;
        if constexpr (decltype(fetch)::value) __builtin_prefetch(step + job.ahead, 0, 2);
        for (int v = 0; v < PARTS; ++v) w[n][v] = load_as<vu>(step + v * VL * 4);
      }
      for (int m = 0; m < MR; ++m) {
        vu x = splat(load_as<uint32_t>(rows[m] + 4 * s));
        for (int n = 0; n < NB; ++n) {
          for (int v = 0; v < PARTS; ++v) acc[m][n][v] = Op::multiply(acc[m][n][v], x, w[n][v]);
        }
      }
    }
  };
  run(0, job.ahead_first, std::false_type{});
  run(job.ahead_first, job.ahead_last, std::true_type{});
  run(job.ahead_last, job.steps, std::false_type{});
  for (int m = 0; m < MR; ++m) {
    for (int n = 0; n < NB; ++n) {
      for (int v = 0; v < PARTS; ++v) {
        auto* c = (float*)job.c + (row + m) * job.ldc + (panel + n) * PANEL + v * VL;
        store_as(c, job.accumulate ? acc[m][n][v] + load_as<Acc>(c) : acc[m][n][v]);
      }
    }
  }
}

template <class Op, int NB, int MR = MAX_ROWS>
void micro_rows(const TileJob& job, int64_t row, int panel, int64_t rows) {
  if constexpr (MR > 0) {
    if (rows == MR) {
      micro<Op, MR, NB>(job, row, panel);
    } else {
      micro_rows<Op, NB, MR - 1>(job, row, panel, rows);
    }
  }
}

template <class Op, int NB = MAX_PANELS>
void micro_panels(const TileJob& job, int64_t row, int panel, int64_t rows, int count) {
  if constexpr (NB > 0) {
    if (count >= NB) {
      micro_rows<Op, NB>(job, row, panel, rows);
    } else {
      micro_panels<Op, NB - 1>(job, row, panel, rows, count);
    }
  }
}

template <class Op>
void multiply(TileJob job) {
  // Equal blocks: 8 rows are 4 + 4, not 6 + 2.
  const int64_t blocks = ceil_div(job.rows, MAX_ROWS);
  const int64_t fetch_first = job.ahead_first, fetch = job.ahead_last - job.ahead_first;
  for (int panel = 0; panel < job.num_panels; panel += MAX_PANELS) {
    const int count = job.num_panels - panel;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = b * job.rows / blocks, end = (b + 1) * job.rows / blocks;
      job.ahead_first = fetch_first + b * fetch / blocks;
      job.ahead_last = fetch_first + (b + 1) * fetch / blocks;
      micro_panels<Op>(job, row, panel, end - row, count);
    }
  }
}

// Float32 is the exact path: a sum of short sums keeps rounding errors an order of magnitude below one long chain's.
void multiply_wide(TileJob job) {
  constexpr int64_t CHAIN = 128;
  const int64_t steps = job.steps, ahead_first = job.ahead_first, ahead_last = job.ahead_last;
  const auto clamp = [](int64_t at, int64_t end) { return at < 0 ? 0 : at < end ? at : end; };
  for (int64_t first = 0; first < steps; first += CHAIN) {
    job.steps = steps - first < CHAIN ? steps - first : CHAIN;
    job.ahead_first = clamp(ahead_first - first, job.steps);
    job.ahead_last = clamp(ahead_last - first, job.steps);
    multiply<F32>(job);
    job.a += job.steps * 4;
    for (int p = 0; p < job.num_panels; ++p) job.panels[p] += job.steps * STEP_BYTES;
    job.accumulate = true;
  }
}

}  // namespace

void multiply_tile(Product product, const TileJob& job) {
  // Where how many rows there are must not show in the bits, one or two are added in the order of tiles, which takes
  // vectors more work. Sums of integers are exact anyway.
  const bool exact = product == Product::INT8;
  if (HAS_AMX && product != Product::F32 && job.steps % 16 == 0 && !((exact || job.any_order) && job.rows <= 2)) {
    amx_multiply(exact, job);
    return;
  }
  switch (product) {
    case Product::F32:
      return multiply_wide(job);
    case Product::BF16:
      return multiply<Bf16>(job);
    case Product::INT8:
      return multiply<Int8>(job);
  }
}

}  // namespace headrace
