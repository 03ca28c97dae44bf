#include "fused.h"

#include <vector>

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
  const AttentionUnit unit(ws, step, block, layer, x, stream, out);
  parallel(ws.threads, [&](Team team) { unit.run(team); });
}

void mlp_block(Workspace& ws, const HrMlp& block, int64_t dtype, int64_t rows, const void* x, float* stream, void* out) {
  const MlpUnit unit(ws, block, dtype, rows, x, stream, out);
  parallel(ws.threads, [&](Team team) { unit.run(team); });
}

void decoder(Workspace& ws, const HrStep& step, int64_t layers, const HrAttention* const* attention,
             const HrMlp* const* mlp, const void* x, float* stream, void* delta) {
  std::vector<AttentionUnit> attentions;
  std::vector<MlpUnit> mlps;
  // Twice: the first round lets the workspace grow to what the largest layer needs, the second finds where it lies.
  for (int round = 0; round < 2; ++round) {
    attentions.clear();
    mlps.clear();
    for (int64_t i = 0; i < layers; ++i) {
      attentions.emplace_back(ws, step, *attention[i], i, i ? delta : x, i ? stream : nullptr, delta);
      mlps.emplace_back(ws, *mlp[i], step.dtype, step.num_tokens, delta, stream, delta);
    }
  }
  parallel(ws.threads, [&](Team team) {
    for (int64_t i = 0; i < layers; ++i) {
      attentions[i].run(team);
      mlps[i].run(team);
    }
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
