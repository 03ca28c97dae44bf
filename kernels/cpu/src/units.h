// A layer's two blocks, ready to be run by a team that is at work already.
#pragma once

#include "fused.h"

namespace headrace {

// Of a unit, at most.
constexpr int UNIT_PHASES = 10;

inline int64_t dtype_bytes(int64_t dtype) { return dtype == HR_F32 ? 4 : 2; }

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

// A block ready to run. Making one may move what the workspace holds; running it by a whole team does not.
class AttentionUnit {
 public:
  AttentionUnit(Workspace& ws, const HrStep& step, const HrAttention& block, int64_t layer, const void* x,
                float* stream, void* out)
      : ws_(ws), step_(step), block_(block), layer_(layer), out_(out), rows_(step.num_tokens),
        input_(reserve(ws.input, act_kind(block.qkv.format, rows_, ws.invariant), rows_, block.qkv.in_features)),
        middle_(ws, block.output, step.dtype, rows_),
        projected_(ws.projected.get<uint8_t>(rows_ * block.qkv.out_features * dtype_bytes(step.dtype))),
        norm_{x, stream, block.norm, float(block.eps), rows_, block.qkv.in_features, step.dtype} {
    plan_attention(ws, step, block.num_heads / block.num_kv_heads);
  }

  void run(Team& team) const {
    const HrLinear &qkv = block_.qkv, &output = block_.output;
    norm_rows(team, ws_, norm_, input_);
    gemm(team, ws_, qkv, input_, rows_, Output{projected_, qkv.out_features, step_.dtype});
    rotate_and_cache(team, step_, layer_, block_.num_heads, projected_, projected_, qkv.out_features);
    attend(team, ws_, AttentionCall{step_, layer_, block_.num_heads, projected_, qkv.out_features, middle_.data,
                                    middle_.ld});
    if (middle_.to.padded > middle_.to.depth) team.each_row(rows_, [&](int64_t r) { middle_.clear_padding(r); });
    middle_.finish(team, ws_, step_.dtype, rows_);
    gemm(team, ws_, output, middle_.to, rows_, Output{out_, output.out_features, step_.dtype});
  }

 private:
  Workspace& ws_;
  const HrStep& step_;
  const HrAttention& block_;
  int64_t layer_;
  void* out_;
  int64_t rows_;
  Activations input_;
  Middle middle_;
  void* projected_;
  Norm norm_;
};

class MlpUnit {
 public:
  MlpUnit(Workspace& ws, const HrMlp& block, int64_t dtype, int64_t rows, const void* x, float* stream, void* out)
      : ws_(ws), block_(block), dtype_(dtype), rows_(rows), out_(out), gated_(can_gate(block.gate_up)),
        input_(reserve(ws.input, act_kind(block.gate_up.format, rows, ws.invariant), rows, block.gate_up.in_features)),
        middle_(ws, block.down, dtype, rows),
        projected_(gated_ ? nullptr : ws.projected.get<uint8_t>(rows * block.gate_up.out_features * dtype_bytes(dtype))),
        norm_{x, stream, block.norm, float(block.eps), rows, block.gate_up.in_features, dtype} {}

  void run(Team& team) const {
    const HrLinear &gate_up = block_.gate_up, &down = block_.down;
    norm_rows(team, ws_, norm_, input_);
    if (gated_) {
      gemm_gated(team, ws_, gate_up, input_, rows_, Output{middle_.data, middle_.ld, dtype_});
      if (middle_.to.padded > middle_.to.depth) team.each_row(rows_, [&](int64_t r) { middle_.clear_padding(r); });
      middle_.finish(team, ws_, dtype_, rows_);
    } else {
      gemm(team, ws_, gate_up, input_, rows_, Output{projected_, gate_up.out_features, dtype_});
      silu_rows(team, ws_, projected_, dtype_, rows_, middle_.to);
    }
    gemm(team, ws_, down, middle_.to, rows_, Output{out_, down.out_features, dtype_});
  }

 private:
  Workspace& ws_;
  const HrMlp& block_;
  int64_t dtype_;
  int64_t rows_;
  void* out_;
  bool gated_;
  Activations input_;
  Middle middle_;
  void* projected_;
  Norm norm_;
};

}  // namespace headrace
