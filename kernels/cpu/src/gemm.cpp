#include <algorithm>

#include "sums.h"

namespace headrace {
namespace {

// Rows of A that are worked through together stay in the second-level cache, of which they may take this much (CPUs with
// AMX have 2 MiB of it a core) …
constexpr int64_t BLOCK_BYTES = (HAS_AMX ? 1600 : 768) << 10;
// … but not fewer than this, as each block reads all weights again.
constexpr int64_t MIN_BLOCK_ROWS = 128;
// From this many rows on, a task of AMX is one pair of panels, as many as it multiplies side by side: they stay in the
// first-level cache while rows stream past them.
constexpr int64_t PAIR_ROWS = 65;
// Tasks a thread should get at least, or the last ones leave the others waiting.
constexpr int64_t TASKS_PER_THREAD = 8;

Product product_of(const Activations& x) {
  return x.kind == Act::F32 ? Product::F32 : x.kind == Act::BF16 ? Product::BF16 : Product::INT8;
}

// MR rows by NB panels of grouped weights: integer dot products inside a group, float32 across groups.
template <int64_t FORMAT, int MR, int NB>
void grouped_micro(const Gemm& g, int64_t row, const uint8_t* const* panels, float* c) {
  constexpr bool NIBBLES = FORMAT != HR_W_Q8_0, MINIMA = FORMAT == HR_W_Q4_1;
  constexpr int32_t ZERO = NIBBLES ? (MINIMA ? 0 : 8) : INT8_OFFSET;
  constexpr int PARTS = PANEL / VL, GROUP_BYTES = GROUP * PANEL / (NIBBLES ? 2 : 1);
  const int64_t groups = g.x.groups(), codes_at = scale_bytes(g.w.in_features) * (MINIMA ? 2 : 1);
  vf acc[MR][NB][PARTS] = {};
  for (int64_t k = 0; k < groups; ++k) {
    vi dot[MR][NB][PARTS];
    for (int m = 0; m < MR; ++m) {
      const vi start = splat(-ZERO * g.x.sums[(row + m) * groups + k]);
      for (int n = 0; n < NB; ++n) {
        for (int v = 0; v < PARTS; ++v) dot[m][n][v] = start;
      }
    }
    for (int s = 0; s < (NIBBLES ? 4 : 8); ++s) {
      vu w[NB][PARTS];
      for (int n = 0; n < NB; ++n) {
        const uint8_t* step = panels[n] + codes_at + k * GROUP_BYTES + s * STEP_BYTES;
        __builtin_prefetch(step + 1024);
        for (int v = 0; v < PARTS; ++v) w[n][v] = load_as<vu>(step + v * VL * 4);
      }
      for (int m = 0; m < MR; ++m) {
        const uint8_t* x = g.x.row(row + m) + k * GROUP + s * 4;
        const vu low = splat(load_as<uint32_t>(x)), high = NIBBLES ? splat(load_as<uint32_t>(x + 16)) : low;
        for (int n = 0; n < NB; ++n) {
          for (int v = 0; v < PARTS; ++v) {
            if constexpr (NIBBLES) {
              dot[m][n][v] = dot4(dot[m][n][v], w[n][v] & 0x0f0f0f0fu, low);
              dot[m][n][v] = dot4(dot[m][n][v], (w[n][v] >> 4) & 0x0f0f0f0fu, high);
            } else {
              dot[m][n][v] = dot4(dot[m][n][v], w[n][v], low);
            }
          }
        }
      }
    }
    for (int n = 0; n < NB; ++n) {
      for (int v = 0; v < PARTS; ++v) {
        const auto* scales = (const uint16_t*)panels[n] + k * PANEL + v * VL;
        const vf scale = load_half(scales);
        for (int m = 0; m < MR; ++m) {
          const float row_scale = g.x.scales[(row + m) * groups + k];
          acc[m][n][v] += __builtin_convertvector(dot[m][n][v], vf) * (scale * row_scale);
          if constexpr (MINIMA) {
            acc[m][n][v] += load_half(scales + groups * PANEL) * (row_scale * float(g.x.sums[(row + m) * groups + k]));
          }
        }
      }
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int n = 0; n < NB; ++n) {
      for (int v = 0; v < PARTS; ++v) store(c + m * TILE_LD + n * PANEL + v * VL, acc[m][n][v]);
    }
  }
}

template <int64_t FORMAT, int MR>
void grouped_panels(const Gemm& g, int64_t row, const uint8_t* const* panels, int count, float* c) {
  constexpr int NB = VL == 16 ? 2 : 1;
  int p = 0;
  for (; p + NB <= count; p += NB) grouped_micro<FORMAT, MR, NB>(g, row, panels + p, c + p * PANEL);
  for (; p < count; ++p) grouped_micro<FORMAT, MR, 1>(g, row, panels + p, c + p * PANEL);
}

template <int64_t FORMAT>
void grouped_tile(const Gemm& g, int64_t row, int64_t rows, const uint8_t* const* panels, int count, float* tile) {
  constexpr int MR = VL == 16 ? 4 : 2;
  int64_t r = 0;
  for (; r + MR <= rows; r += MR) grouped_panels<FORMAT, MR>(g, row + r, panels, count, tile + r * TILE_LD);
  for (; r < rows; ++r) grouped_panels<FORMAT, 1>(g, row + r, panels, count, tile + r * TILE_LD);
}

// ahead: how many panels further the weights lie that this thread reads next; 0: not known, or in the cache already.
void run_task(Workspace& ws, int rank, const Gemm& g, int64_t first, int64_t last, const int64_t* panels, int count,
              int64_t ahead) {
  const Product product = product_of(g.x);
  const bool grouped = is_grouped(g.w.format), direct = g.x.kind == Act::INT8_GROUP;
  TileJob job = {};
  for (int p = 0; p < count; ++p) job.panels[p] = panel_of(g.w, panels[p]);
  if (grouped && !direct) {
    const int64_t bytes = g.x.padded * PANEL * element_bytes(g.x.kind);
    auto* unpacked = ws.thread_scratch[rank].get<uint8_t>(bytes * TILE_PANELS);
    for (int p = 0; p < count; ++p) {
      const uint8_t* next = job.panels[p] + ahead * panel_bytes(g.w.format, g.w.in_features);
      unpack_panel(g.w, panels[p], product, unpacked + p * bytes, next);
      job.panels[p] = unpacked + p * bytes;
    }
  }
  alignas(64) float tile[TILE_ROWS * TILE_LD];
  job.lda = g.x.ld;
  job.num_panels = count;
  job.any_order = !ws.invariant;
  job.passing = g.rows >= PAIR_ROWS;
  job.steps = g.x.padded * element_bytes(g.x.kind) / 4;
  job.c = tile;
  job.ldc = TILE_LD;
  job.ahead = ahead * panel_bytes(g.w.format, g.w.in_features);
  const int64_t fetched = ahead && !grouped ? job.steps : 0, blocks = ceil_div(last - first, TILE_ROWS);
  for (int64_t row = first; row < last; row += TILE_ROWS) {
    job.a = g.x.row(row);
    job.rows = last - row < TILE_ROWS ? last - row : TILE_ROWS;
    const int64_t block = (row - first) / TILE_ROWS;
    job.ahead_first = round_up(block * fetched / blocks, 16);
    job.ahead_last = round_up((block + 1) * fetched / blocks, 16);
    if (direct) {
      const auto run = g.w.format == HR_W_Q4_0   ? grouped_tile<HR_W_Q4_0>
                       : g.w.format == HR_W_Q4_1 ? grouped_tile<HR_W_Q4_1>
                                                 : grouped_tile<HR_W_Q8_0>;
      run(g, row, job.rows, job.panels, count, tile);
    } else {
      multiply_tile(product, job);
    }
    store_sums(Sums{g, rank, panels, count, tile, row, job.rows});
  }
}

void run(Team& team, Workspace& ws, const Gemm& g) {
  // A unit is a panel, or a gate panel and its up panel.
  const int64_t width = g.gated ? 2 : 1, units = panel_count(g.w.out_features) / width;
  const int64_t fitting = BLOCK_BYTES / g.x.ld, block_rows = fitting > MIN_BLOCK_ROWS ? fitting : MIN_BLOCK_ROWS;
  const Parts parts = team.cut(g.rows);
  const int64_t each = ceil_div(ceil_div(g.rows, parts.count), block_rows), blocks = each * parts.count;
  const int64_t neighbours = ceil_div(team.size, parts.count);
  int64_t per_task = TILE_PANELS / width;
  while (per_task > 1 && units * blocks / per_task < TASKS_PER_THREAD * team.size) per_task /= 2;
  if (HAS_AMX && g.rows >= PAIR_ROWS) per_task = std::min(per_task, 2 / width);
  const int64_t tasks = ceil_div(units, per_task);
  Parts ranges;
  ranges.count = parts.count;
  for (int i = 0; i < parts.count; ++i) ranges.bounds[i + 1] = (i + 1) * each * tasks;
  team.each(ranges, 1, [&](int64_t task) {
    const int64_t begin = task % tasks * per_task, end = begin + per_task < units ? begin + per_task : units;
    int64_t panels[TILE_PANELS];
    int count = 0;
    for (int64_t half = 0; half < width; ++half) {
      for (int64_t unit = begin; unit < end; ++unit) panels[count++] = half * units + unit;
    }
    const int64_t block = task / tasks, part = block / each;
    const int64_t from = parts.bounds[part], rows = parts.bounds[part + 1] - from;
    const int64_t first = from + std::min(rows, round_up(block % each * rows / each, TILE_ROWS));
    const int64_t last = from + std::min(rows, round_up((block % each + 1) * rows / each, TILE_ROWS));
    // The next task of this thread is most likely as many tasks on as there are threads in this part.
    const bool more = begin + neighbours * per_task < units;
    run_task(ws, team.rank, g, first, last, panels, count, more ? neighbours * per_task : 0);
  });
}

}  // namespace

Activations reserve(ActivationBuffers& buffers, Act kind, int64_t rows, int64_t depth) {
  Activations to = {};
  to.kind = kind;
  to.depth = depth;
  to.padded = padded_depth(depth);
  to.ld = act_stride(kind, to.padded);
  const int64_t padded_rows = round_up(rows, TILE_ROWS);
  to.data = buffers.data.get<uint8_t>(padded_rows * to.ld);
  if (kind == Act::INT8_ROW || kind == Act::INT8_GROUP) {
    const int64_t count = kind == Act::INT8_ROW ? rows : rows * to.groups();
    to.scales = buffers.scales.get<float>(count);
    to.sums = buffers.sums.get<int32_t>(count);
  }
  return to;
}

void gemm(Team& team, Workspace& ws, const HrLinear& w, const Activations& x, int64_t rows, const Output& out) {
  run(team, ws, Gemm{w, x, rows, out, false});
}

void gemm_best(Team& team, Workspace& ws, const HrLinear& w, const Activations& x, int64_t rows, const Logits& out) {
  run(team, ws, Gemm{w, x, rows, Output{}, false, &out});
}

void gemm_gated(Team& team, Workspace& ws, const HrLinear& w, const Activations& x, int64_t rows, const Output& out) {
  run(team, ws, Gemm{w, x, rows, out, true});
}

}  // namespace headrace
