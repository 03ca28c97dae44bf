// Choosing a token of each row by its weight, exp((logit - peak) / temperature); kernels/draws.py has the rules.
#pragma once

#include <cstdint>

namespace headrace {

// What the rows draw by; every pointer has an entry a row.
struct Draws {
  const float* peak;         // the row's largest logit, finite
  const float* temperature;  // above 0
  const int64_t* top_k;      // 0: no limit
  const double* top_p;
  const double* min_p;
  const double* unit;  // [rows][4] in [0, 1)
};

// Floats of scratch that a row takes.
int64_t draw_width(int64_t words);

// logits [rows][words] -> tokens [rows]; scratch [rows][draw_width(words)].
void draw(const float* logits, int64_t rows, int64_t words, const Draws& by, float* scratch, int64_t* tokens,
          int threads);

}  // namespace headrace
