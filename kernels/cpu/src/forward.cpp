// A whole step of a model: embedding, layers, final norm, logits and their arg max.
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

// Place of the first largest, or of the first NaN. Twice over the row, which the cache holds: what is looked for the
// second time is one value.
int64_t first_best(const float* row, int64_t count) {
  vf largest[2] = {splat(row[0]), splat(row[0])};
  vi nan = {};
  int64_t i = 0;
  for (; i + 2 * VL <= count; i += 2 * VL) {
    for (int v = 0; v < 2; ++v) {
      const vf x = load(row + i + v * VL);
      nan |= (vi)(x != x);
      largest[v] = x > largest[v] ? x : largest[v];
    }
  }
  float best = max_lanes(vmax(largest[0], largest[1]));
  bool odd = any_lane(nan);
  for (; i < count; ++i) {
    odd |= row[i] != row[i];
    best = row[i] > best ? row[i] : best;
  }
  i = 0;
  if (odd) {
    while (row[i] == row[i]) ++i;
    return i;
  }
  for (; i + VL <= count; i += VL) {
    if (any_lane((vi)(load(row + i) == splat(best)))) break;
  }
  while (row[i] != best) ++i;
  return i;
}

class Head {
 public:
  Head(Workspace& ws, const HrModel& model, int64_t dtype, const HrTokens& tokens)
      : ws_(ws), head_(model.head), dtype_(dtype), tokens_(tokens),
        input_(reserve(ws.input, act_kind(head_.format, tokens.sampled, ws.invariant), tokens.sampled,
                       head_.in_features)) {}

  void run(Team& team) const {
    write_rows(team, ws_, tokens_.hidden, dtype_, tokens_.sampled, input_, tokens_.sample_at);
    gemm(team, ws_, head_, input_, tokens_.sampled, Output{tokens_.logits, head_.out_features, HR_F32});
    team.each(tokens_.sampled, 1, [&](int64_t r) {
      tokens_.best[r] = first_best(tokens_.logits + r * head_.out_features, head_.out_features);
    });
  }

 private:
  Workspace& ws_;
  const HrLinear& head_;
  int64_t dtype_;
  const HrTokens& tokens_;
  Activations input_;
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
