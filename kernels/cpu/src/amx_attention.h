// Attention of heads of up to 64 features in AMX tiles: what tiled.cpp does, panel by panel of 16 query rows, so that all
// a panel has gathered stays in tile registers over a pair of blocks, and the matrix unit works on the products of the
// next block while vectors compute the exponentials of this one. Included by tiled.cpp alone.
#pragma once

#if defined(__AMX_BF16__)

constexpr int64_t AMX_WIDTH = 64;

// Queries and values of a panel pass through the first-level cache, which the pair of blocks fills: both are loaded with
// the hint that they will not be needed again.
// Tile registers: 0-3 gathered values, 16 features each; 4-5 queries; 6 scores, then weights; 7 keys, then values.
inline void amx_load_queries(const bf16* panel) {
  _tile_stream_loadd(4, panel, STEP_BYTES);
  _tile_stream_loadd(5, panel + 16 * PANEL * 2, STEP_BYTES);
}

inline void amx_load_values(const float* acc) {
  _tile_stream_loadd(0, acc, BAND * 4);
  _tile_stream_loadd(1, acc + 16 * BAND, BAND * 4);
  _tile_stream_loadd(2, acc + 32 * BAND, BAND * 4);
  _tile_stream_loadd(3, acc + 48 * BAND, BAND * 4);
}

inline void amx_store_values(float* acc) {
  _tile_stored(0, acc, BAND * 4);
  _tile_stored(1, acc + 16 * BAND, BAND * 4);
  _tile_stored(2, acc + 32 * BAND, BAND * 4);
  _tile_stored(3, acc + 48 * BAND, BAND * 4);
}

// 16 keys [16][64] times the queries -> scores [16].
inline void amx_multiply_keys(const bf16* keys, float* scores) {
  __asm__ volatile("" ::: "memory");
  _tile_zero(6);
  _tile_loadd(7, keys, AMX_WIDTH * 2);
  _tile_dpbf16ps(6, 7, 4);
  _tile_loadd(7, keys + 32, AMX_WIDTH * 2);
  _tile_dpbf16ps(6, 7, 5);
  _tile_stored(6, scores, BAND * 4);
}

// 32 keys' values [64][KEY_BLOCK] times the weights, added to what was gathered.
inline void amx_multiply_values(const bf16* values, const bf16* weights) {
  // GCC's tile loads do not say that they read memory: earlier stores must not move past them.
  __asm__ volatile("" ::: "memory");
  _tile_loadd(6, weights, STEP_BYTES);
  _tile_loadd(7, values, KEY_BLOCK * 2);
  _tile_dpbf16ps(0, 7, 6);
  _tile_loadd(7, values + 16 * KEY_BLOCK, KEY_BLOCK * 2);
  _tile_dpbf16ps(1, 7, 6);
  _tile_loadd(7, values + 32 * KEY_BLOCK, KEY_BLOCK * 2);
  _tile_dpbf16ps(2, 7, 6);
  _tile_loadd(7, values + 48 * KEY_BLOCK, KEY_BLOCK * 2);
  _tile_dpbf16ps(3, 7, 6);
}

// One panel against one block, while the matrix unit makes the scores of what comes next.
template <bool MASKED>
void amx_panel(const Tile<bf16>& t, const bf16* values, int64_t first, int64_t lane, float scale, float* acc,
               const bf16* next_keys) {
  // Scores take the place of those that are used up: the first-level cache is full.
  const auto next = [&](int64_t j) {
    if (next_keys) amx_multiply_keys(next_keys + j * AMX_WIDTH, t.scores + j * BAND);
  };
  vf factor;
  if (find_reference<bf16, MASKED>(t, t.scores, first, lane, scale, factor)) {
    amx_store_values(acc);
    rescale(t, lane, factor);
    __asm__ volatile("" ::: "memory");
    amx_load_values(acc);
  }
  exponentials<bf16, MASKED>(t, t.scores, first, lane, scale, t.weights, [&](int64_t j) {
    if (j > 0) next(j - 16);
    if (j == 32) amx_multiply_values(values, t.weights);
  });
  next(KEY_BLOCK - 16);
  amx_multiply_values(values + 32, t.weights + 32 * PANEL);
}

// All panels that may see some of up to two loaded blocks.
inline void amx_attend(const Tile<bf16>& t, int64_t first, int count, float scale) {
  const int64_t panels = t.last;
  const auto sees = [&](int64_t panel, int block) {
    return t.seen[panel * PANEL + PANEL - 1] > first + block * KEY_BLOCK;
  };
  int64_t panel = t.first;
  while (!sees(panel, 0)) ++panel;
  int block = 0;
  amx_load_queries(t.query + panel * PANEL * t.depth);
  for (int64_t j = 0; j < KEY_BLOCK; j += 16) amx_multiply_keys(t.keys + j * AMX_WIDTH, t.scores + j * BAND);
  while (panel < panels) {
    float* acc = t.part.acc + panel / 2 * t.width * BAND + panel % 2 * PANEL;
    if (block == 0) amx_load_values(acc);
    const bool last = block + 1 == count || !sees(panel, block + 1);
    const int64_t next_panel = last ? panel + 1 : panel, next_block = last ? 0 : block + 1;
    if (last && next_panel < panels) amx_load_queries(t.query + next_panel * PANEL * t.depth);
    const int64_t at = first + block * KEY_BLOCK, lane = panel * PANEL;
    const auto run = t.seen[lane] < at + KEY_BLOCK ? amx_panel<true> : amx_panel<false>;
    run(t, t.values + block * KEY_BLOCK * AMX_WIDTH, at, lane, scale, acc,
        next_panel < panels ? t.keys + next_block * KEY_BLOCK * AMX_WIDTH : nullptr);
    if (last) amx_store_values(acc);
    panel = next_panel;
    block = int(next_block);
  }
}

#endif
