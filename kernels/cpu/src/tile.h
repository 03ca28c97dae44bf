// The core of every matrix product here: a tile of C = A * packed B.
//
// B comes in panels of 16 output features. A panel is a run of 64-byte steps; step s holds, for each of the 16 features,
// the 4 bytes of weights that multiply bytes 4s … 4s + 3 of a row of A: one float32, two bf16, or four int8. So one loop
// serves all three types, a step is one broadcast and one multiply-add a row, and 16 steps are an AMX operand tile as
// they lie.
//
// Rows of A and C come in multiples of TILE_ROWS of addressable memory; what the padding rows hold does not matter.
#pragma once

#include "simd.h"

namespace headrace {

constexpr int PANEL = 16;
constexpr int TILE_ROWS = 32;
constexpr int TILE_PANELS = 4;
constexpr int TILE_LD = PANEL * TILE_PANELS;
constexpr int STEP_BYTES = 64;
// Rows of A are padded with zeros to this many features (an AMX tile of int8).
constexpr int64_t DEPTH_ALIGN = 64;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

enum class Product { F32, BF16, INT8 };

// One tile's operands. steps = depth * element size / 4, a multiple of 16 when the depth is padded.
struct TileJob {
  const uint8_t* a;
  int64_t lda;  // bytes
  const uint8_t* panels[TILE_PANELS];
  int num_panels;
  int64_t steps;
  void* c;  // float, or int32 for INT8
  int64_t ldc;  // elements
  int64_t rows;
  bool accumulate;  // add to C instead of overwriting it
  bool any_order;   // few rows may be added up in another order than many
  bool passing;     // other rows follow, and these are not multiplied by other panels
  // Weights are used once, so they come from memory, and nobody but the caller knows which are next: steps
  // [ahead_first, ahead_last) of the panels `ahead` bytes further are fetched into the second-level cache on the way.
  int64_t ahead;
  int64_t ahead_first;
  int64_t ahead_last;
};

void multiply_tile(Product product, const TileJob& job);

}  // namespace headrace
