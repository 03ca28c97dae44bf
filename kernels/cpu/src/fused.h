// Units of a model, each one parallel call of a few phases.
#pragma once

#include "attention.h"
#include "gemm.h"

namespace headrace {

// RMS norm (Zhang, Sennrich 2019) of x, or of stream + x, which then is the new stream; `stream` may be null. The stream
// is float32 whatever x is: rounding the sum after every layer would be most of bf16's error.
struct Norm {
  const void* x;
  float* stream;
  const float* weight;
  float eps;
  int64_t rows;
  int64_t width;
  int64_t dtype;
};

void norm_rows(Team& team, Workspace& ws, const Norm& norm, const Activations& to);

// Rows of `dtype` [rows, to.depth] as `to` wants them; `at`: which ones, null: all in order.
void write_rows(Team& team, Workspace& ws, const void* x, int64_t dtype, int64_t rows, const Activations& to,
                const int64_t* at = nullptr);

// Unpadded rows of the model's dtype.
Activations plain_rows(int64_t dtype, int64_t width, void* data);

// x plus what is left of `stream` and back: see Ops.attention_block and Ops.mlp_block. `out` may be x.
void attention_block(Workspace& ws, const HrStep& step, const HrAttention& block, int64_t layer, const void* x,
                     float* stream, void* out);
void mlp_block(Workspace& ws, const HrMlp& block, int64_t dtype, int64_t rows, const void* x, float* stream, void* out);

// A whole model in one parallel call: its threads never sleep in between, and the caller's interpreter has nothing to do
// while other threads may want it. Token ids must be in range.
void forward(Workspace& ws, const HrStep& step, const HrModel& model, const HrTokens& tokens);

// x [rows, in] of `dtype` -> out.
void linear(Workspace& ws, const HrLinear& w, int64_t dtype, int64_t rows, const void* x, const Output& out);

// [rows, 2 * width], gate first -> [rows, width].
void silu_rows(Team& team, Workspace& ws, const void* x, int64_t dtype, int64_t rows, const Activations& to);

}  // namespace headrace
