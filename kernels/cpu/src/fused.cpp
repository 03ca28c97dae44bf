#include "units.h"

namespace headrace {
namespace {

template <class T>
void norm_row(const Norm& norm, int64_t r, float* row, const Activations& to) {
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
  write_row(to, r, row, [&](int64_t i) {
    return i < norm.width ? load(row + i) * factor * load_upto(norm.weight + i, norm.width - i) : vf{};
  });
}

template <class T>
void silu_row(const T* x, int64_t r, float* row, const Activations& to) {
  write_row(to, r, row, [&](int64_t i) {
    return silu_mul(load_from(x, i, to.depth), load_from(x + to.depth, i, to.depth), (T*)nullptr);
  });
}

}  // namespace

void norm_rows(Team& team, Workspace& ws, const Norm& norm, const Activations& to) {
  team.each_row(norm.rows, [&](int64_t r) {
    float* row = ws.thread_scratch[team.rank].get<float>(to.padded);
    (norm.dtype == HR_F32 ? norm_row<float> : norm_row<bf16>)(norm, r, row, to);
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
    const auto write = [&](const auto* x) {
      write_row(to, r, row, [&](int64_t i) { return load_from(x, i, to.depth); });
    };
    if (dtype == HR_F32) {
      write((const float*)x + from);
    } else {
      write((const bf16*)x + from);
    }
  });
}

void silu_rows(Team& team, Workspace& ws, const void* x, int64_t dtype, int64_t rows, const Activations& to) {
  team.each_row(rows, [&](int64_t r) {
    float* row = ws.thread_scratch[team.rank].get<float>(to.padded);
    if (dtype == HR_F32) {
      silu_row((const float*)x + r * 2 * to.depth, r, row, to);
    } else {
      silu_row((const bf16*)x + r * 2 * to.depth, r, row, to);
    }
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
