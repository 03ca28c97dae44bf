// Linear layers over packed weights, inside a parallel call.
#pragma once

#include "activations.h"
#include "best.h"
#include "team.h"
#include "workspace.h"

namespace headrace {

// Where results go: [rows, features] of `dtype`.
struct Output {
  void* data;
  int64_t ld;  // elements
  int64_t dtype;
};

// Where logits go: each row's largest to `best`, which was cleared, and all of them to line lines[row] of `data`
// [lines, features], unless that is negative. No lines: row by row; no data: nowhere.
struct Logits {
  float* data;
  const int64_t* lines;
  const Best& best;
};

// Memory for `rows` activations of a layer; every thread calls nothing here, the caller does before the parallel part.
Activations reserve(ActivationBuffers& buffers, Act kind, int64_t rows, int64_t depth);

// x * w^T + bias. The whole team calls it, and returns when all of it is done.
void gemm(Team& team, Workspace& ws, const HrLinear& w, const Activations& x, int64_t rows, const Output& out);

// The same with logits.
void gemm_best(Team& team, Workspace& ws, const HrLinear& w, const Activations& x, int64_t rows, const Logits& out);

// silu(x * gate^T) * (x * up^T), gate being the first half of w's features. Needs whole panels: see can_gate.
void gemm_gated(Team& team, Workspace& ws, const HrLinear& w, const Activations& x, int64_t rows, const Output& out);

inline bool can_gate(const HrLinear& w) { return w.out_features % (2 * PANEL) == 0; }

// The last argument only names the type the result is stored as.
inline vf silu_mul(vf gate, vf up, float*) { return gate / (1.0f + vexp(-gate)) * up; }
inline vf silu_mul(vf gate, vf up, bf16*) { return gate * reciprocal_coarse(1.0f + vexp_coarse(-gate)) * up; }

}  // namespace headrace
