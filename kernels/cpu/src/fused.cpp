#include "units.h"

namespace headrace {
namespace {

template <class T>
void norm_row(const Norm& norm, int64_t r, float* row, int64_t padded) {
  const T* x = (const T*)norm.x + r * norm.width;
  float* stream = norm.stream ? norm.stream + r * norm.width : nullptr;
  vf squares = {};
  for (int64_t i = 0; i < norm.width; i += VL) {
    const int64_t n = norm.width - i;
    vf value = load_upto(x + i, n);
    if (stream) {
      value += load_upto(stream + i, n);
      store_upto(stream + i, value, n);
    }
    squares += value * value;
    store(row + i, value);
  }
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) / float(norm.width) + norm.eps);
  for (int64_t i = 0; i < norm.width; i += VL) {
    store(row + i, load(row + i) * factor * load_upto(norm.weight + i, norm.width - i));
  }
  const int64_t end = round_up(norm.width, VL);
  if (end < padded) std::memset(row + end, 0, (padded - end) * 4);
}

template <class T>
void silu_row(const T* x, int64_t width, int64_t padded, float* row) {
  for (int64_t i = 0; i < width; i += VL) {
    store(row + i, silu_mul(load_upto(x + i, width - i), load_upto(x + width + i, width - i), (T*)nullptr));
  }
  const int64_t end = round_up(width, VL);
  if (end < padded) std::memset(row + end, 0, (padded - end) * 4);
}

}  // namespace

void norm_rows(Team& team, Workspace& ws, const Norm& norm, const Activations& to) {
  team.each_row(norm.rows, [&](int64_t r) {
    float* row = ws.thread_scratch[team.rank].get<float>(to.padded);
    (norm.dtype == HR_F32 ? norm_row<float> : norm_row<bf16>)(norm, r, row, to.padded);
    write_row(to, r, row);
  });
}

Activations plain_rows(int64_t dtype, int64_t width, void* data) {
  Activations to = {};
  to.kind = dtype == HR_F32 ? Act::F32 : Act::BF16;
  to.depth = to.padded = width;
  to.ld = width * element_bytes(to.kind);
  to.data = (uint8_t*)data;
  return to;
}

void write_rows(Team& team, Workspace& ws, const void* x, int64_t dtype, int64_t rows, const Activations& to,
                const int64_t* at) {
  team.each_row(rows, [&](int64_t r) {
    float* row = ws.thread_scratch[team.rank].get<float>(to.padded);
    const int64_t from = (at ? at[r] : r) * to.depth;
    if (dtype == HR_F32) {
      widen_row((const float*)x + from, to.depth, to.padded, row);
    } else {
      widen_row((const bf16*)x + from, to.depth, to.padded, row);
    }
    write_row(to, r, row);
  });
}

void silu_rows(Team& team, Workspace& ws, const void* x, int64_t dtype, int64_t rows, const Activations& to) {
  team.each_row(rows, [&](int64_t r) {
    float* row = ws.thread_scratch[team.rank].get<float>(to.padded);
    if (dtype == HR_F32) {
      silu_row((const float*)x + r * 2 * to.depth, to.depth, to.padded, row);
    } else {
      silu_row((const bf16*)x + r * 2 * to.depth, to.depth, to.padded, row);
    }
    write_row(to, r, row);
  });
}

void attention_block(Workspace& ws, const HrStep& step, const HrAttention& block, int64_t layer, const void* x,
                     float* stream, void* out) {
  const AttentionUnit unit(ws, step, block, layer, x, stream, out);
  parallel(ws.threads, [&](Team team) { unit.run(team); });
}

void mlp_block(Workspace& ws, const HrMlp& block, int64_t dtype, int64_t rows, const void* x, float* stream, void* out) {
  const MlpUnit unit(ws, block, dtype, rows, x, stream, out);
  parallel(ws.threads, [&](Team team) { unit.run(team); });
}

void linear(Workspace& ws, const HrLinear& w, int64_t dtype, int64_t rows, const void* x, const Output& out) {
  const Activations input = reserve(ws.input, act_kind(w.format, rows, ws.invariant), rows, w.in_features);
  parallel(ws.threads, [&](Team team) {
    write_rows(team, ws, x, dtype, rows, input);
    gemm(team, ws, w, input, rows, out);
  });
}

}  // namespace headrace
