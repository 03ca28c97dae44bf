#include "fused.h"

namespace headrace {
namespace {

int64_t dtype_bytes(int64_t dtype) { return dtype == HR_F32 ? 4 : 2; }

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

void write_rows(Team& team, Workspace& ws, const void* x, int64_t dtype, int64_t rows, const Activations& to) {
  team.each_row(rows, [&](int64_t r) {
    float* row = ws.thread_scratch[team.rank].get<float>(to.padded);
    if (dtype == HR_F32) {
      widen_row((const float*)x + r * to.depth, to.depth, to.padded, row);
    } else {
      widen_row((const bf16*)x + r * to.depth, to.depth, to.padded, row);
    }
    write_row(to, r, row);
  });
}

template <class T>
void silu_row(const T* x, int64_t width, int64_t padded, float* row) {
  for (int64_t i = 0; i < width; i += VL) {
    store(row + i, silu_mul(load_upto(x + i, width - i), load_upto(x + width + i, width - i), (T*)nullptr));
  }
  const int64_t end = round_up(width, VL);
  if (end < padded) std::memset(row + end, 0, (padded - end) * 4);
}

// The input of a block's second linear layer: produced in the model's dtype, straight into place where the layer reads
// that, else into a staging buffer that is converted in a phase of its own.
struct Middle {
  Activations to;
  bool staged;
  void* data;
  int64_t ld;

  Middle(Workspace& ws, const HrLinear& w, int64_t dtype, int64_t rows) {
    const Act kind = act_kind(w.format, rows, ws.invariant);
    to = reserve(ws.middle, kind, rows, w.in_features);
    staged = kind != (dtype == HR_F32 ? Act::F32 : Act::BF16);
    data = staged ? ws.staging.get<uint8_t>(rows * w.in_features * dtype_bytes(dtype)) : to.data;
    ld = staged ? w.in_features : to.ld / dtype_bytes(dtype);
  }

  // Columns the producer does not write, but the layer reads. No-op where the depth needs no padding.
  void clear_padding(int64_t r) const {
    const int64_t begin = to.depth * element_bytes(to.kind), end = to.padded * element_bytes(to.kind);
    if (!staged && begin < end) std::memset(to.row(r) + begin, 0, end - begin);
  }

  void finish(Team& team, Workspace& ws, int64_t dtype, int64_t rows) const {
    if (staged) write_rows(team, ws, data, dtype, rows, to);
  }
};

}  // namespace

void norm_rows(Team& team, Workspace& ws, const Norm& norm, const Activations& to) {
  team.each_row(norm.rows, [&](int64_t r) {
    float* row = ws.thread_scratch[team.rank].get<float>(to.padded);
    (norm.dtype == HR_F32 ? norm_row<float> : norm_row<bf16>)(norm, r, row, to.padded);
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
  const int64_t rows = step.num_tokens, dtype = step.dtype;
  const HrLinear &qkv = block.qkv, &output = block.output;
  plan_attention(ws, step, block.num_heads / block.num_kv_heads);
  const Activations input = reserve(ws.input, act_kind(qkv.format, rows, ws.invariant), rows, qkv.in_features);
  const Middle middle(ws, output, dtype, rows);
  auto* projected = ws.projected.get<uint8_t>(rows * qkv.out_features * dtype_bytes(dtype));
  const Norm norm = {x, stream, block.norm, float(block.eps), rows, qkv.in_features, dtype};
  const AttentionCall call = {step,         layer,      block.num_heads, projected, qkv.out_features,
                              middle.data, middle.ld};
  parallel(ws.threads, [&](Team team) {
    norm_rows(team, ws, norm, input);
    gemm(team, ws, qkv, input, rows, Output{projected, qkv.out_features, dtype});
    rotate_and_cache(team, step, layer, block.num_heads, projected, projected, qkv.out_features);
    attend(team, ws, call);
    if (middle.to.padded > middle.to.depth) team.each_row(rows, [&](int64_t r) { middle.clear_padding(r); });
    middle.finish(team, ws, dtype, rows);
    gemm(team, ws, output, middle.to, rows, Output{out, output.out_features, dtype});
  });
}

void mlp_block(Workspace& ws, const HrMlp& block, int64_t dtype, int64_t rows, const void* x, float* stream, void* out) {
  const HrLinear &gate_up = block.gate_up, &down = block.down;
  const Activations input = reserve(ws.input, act_kind(gate_up.format, rows, ws.invariant), rows, gate_up.in_features);
  const Middle middle(ws, down, dtype, rows);
  const bool gated = can_gate(gate_up);
  void* projected = gated ? nullptr : ws.projected.get<uint8_t>(rows * gate_up.out_features * dtype_bytes(dtype));
  const Norm norm = {x, stream, block.norm, float(block.eps), rows, gate_up.in_features, dtype};
  parallel(ws.threads, [&](Team team) {
    norm_rows(team, ws, norm, input);
    if (gated) {
      gemm_gated(team, ws, gate_up, input, rows, Output{middle.data, middle.ld, dtype});
      if (middle.to.padded > middle.to.depth) team.each_row(rows, [&](int64_t r) { middle.clear_padding(r); });
      middle.finish(team, ws, dtype, rows);
    } else {
      gemm(team, ws, gate_up, input, rows, Output{projected, gate_up.out_features, dtype});
      silu_rows(team, ws, projected, dtype, rows, middle.to);
    }
    gemm(team, ws, down, middle.to, rows, Output{out, down.out_features, dtype});
  });
}

void linear(Workspace& ws, const HrLinear& w, int64_t dtype, int64_t rows, const void* x, const Output& out) {
  const Activations input = reserve(ws.input, act_kind(w.format, rows, ws.invariant), rows, w.in_features);
  parallel(ws.threads, [&](Team team) {
    write_rows(team, ws, x, dtype, rows, input);
    gemm(team, ws, w, input, rows, out);
  });
}

}  // namespace headrace
