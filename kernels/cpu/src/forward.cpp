// A whole step of a model: embedding, layers, final norm, logits and the largest of them.
#include <vector>

#include "units.h"

namespace headrace {
namespace {

// Embeddings, and the same in float32: they start the residual stream.
template <class T>
void embed(Team& team, Workspace& ws, const HrLinear& table, const int64_t* ids, int64_t rows, T* x, float* stream) {
  const int64_t depth = table.in_features;
  team.each_row(rows, [&](int64_t r) {
    float* row = ws.thread_scratch[team.rank].get<float>(padded_depth(depth));
    unpack_row(table, ids[r], row);
    for (int64_t i = 0; i < depth; i += VL) {
      T* at = x + r * depth + i;
      store_upto(at, load(row + i), depth - i);
      store_upto(stream + r * depth + i, load_upto(at, depth - i), depth - i);
    }
  });
}

class Head {
 public:
  Head(Workspace& ws, const HrModel& model, int64_t dtype, const HrTokens& tokens)
      : ws_(ws), head_(model.head), dtype_(dtype), tokens_(tokens),
        input_(reserve(ws.input, act_kind(head_.format, tokens.sampled, ws.invariant), tokens.sampled,
                       head_.in_features)),
        best_(ws.best, ws.threads, tokens.sampled) {}

  void run(Team& team) const {
    const int64_t rows = tokens_.sampled;
    team.each_row(rows, [&](int64_t r) { best_.clear(r); });
    write_rows(team, ws_, tokens_.hidden, dtype_, rows, input_, tokens_.sample_at);
    gemm_best(team, ws_, head_, input_, rows, Logits{tokens_.logits, tokens_.lines, best_});
    team.each_row(rows, [&](int64_t r) { best_.merge(r, tokens_.peaks + r, tokens_.best + r); });
  }

 private:
  Workspace& ws_;
  const HrLinear& head_;
  int64_t dtype_;
  const HrTokens& tokens_;
  Activations input_;
  Best best_;
};

}  // namespace

void forward(Workspace& ws, const HrStep& step, const HrModel& model, const HrTokens& tokens) {
  const int64_t rows = step.num_tokens, depth = model.embedding.in_features;
  void* x = ws.embedded.get<uint8_t>(rows * depth * dtype_bytes(step.dtype));
  float* stream = ws.stream.get<float>(rows * depth);
  std::vector<AttentionUnit> attentions;
  std::vector<MlpUnit> mlps;
  std::vector<Head> head;
  // Twice: the first round lets the workspace grow to what the largest unit needs, the second finds where it lies.
  for (int round = 0; round < 2; ++round) {
    attentions.clear();
    mlps.clear();
    head.clear();
    for (int64_t i = 0; i < model.layers; ++i) {
      attentions.emplace_back(ws, step, *model.attention[i], i, x, i ? stream : nullptr, x);
      mlps.emplace_back(ws, *model.mlp[i], step.dtype, rows, x, stream, x);
    }
    if (tokens.sampled) head.emplace_back(ws, model, step.dtype, tokens);
  }
  const Norm norm = {x, stream, model.norm, float(model.eps), rows, depth, step.dtype};
  const Activations hidden = plain_rows(step.dtype, depth, tokens.hidden);
  const auto run = [&](Team team) {
    team.offer_core();
    if (step.dtype == HR_F32) {
      embed(team, ws, model.embedding, tokens.ids, rows, (float*)x, stream);
    } else {
      embed(team, ws, model.embedding, tokens.ids, rows, (bf16*)x, stream);
    }
    for (int64_t i = 0; i < model.layers; ++i) {
      attentions[i].run(team);
      mlps[i].run(team);
    }
    norm_rows(team, ws, norm, hidden);
    if (tokens.sampled) head[0].run(team);
  };
  parallel(ws.threads, run, int(2 * UNIT_PHASES * model.layers) + PHASES);
}

}  // namespace headrace
