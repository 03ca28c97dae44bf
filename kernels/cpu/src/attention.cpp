#include "attention.h"

#include <algorithm>

namespace headrace {
namespace {

void plan_decode(Workspace& ws, const HrStep& step, int32_t row) {
  const int32_t length = step.seq_lens[row];
  // Even parts of whole vectors, so that the last one is not a stub.
  const int64_t parts = ceil_div(length, DECODE_KEYS);
  const int32_t keys = int32_t(round_up(ceil_div(length, parts), 16));
  for (int32_t head = 0; head < step.num_kv_heads; ++head) {
    if (parts > 1) ws.merges.push_back({row, head, int32_t(ws.num_partials), int32_t(ceil_div(length, keys))});
    for (int32_t first = 0; first < length; first += keys) {
      const int32_t partial = parts > 1 ? int32_t(ws.num_partials++) : -1;
      ws.attention.push_back({row, head, 0, 1, first, std::min(first + keys, length), partial});
    }
  }
}

void plan_prefill(Workspace& ws, const HrStep& step, int32_t row, int64_t group) {
  const int32_t tokens = step.query_start[row + 1] - step.query_start[row];
  const int32_t tile = int32_t(std::max<int64_t>(1, PREFILL_ROWS / group));
  for (int32_t first = 0; first < tokens; first += tile) {
    const int32_t count = std::min(tile, tokens - first);
    const int32_t last_key = step.seq_lens[row] - tokens + first + count;
    for (int32_t head = 0; head < step.num_kv_heads; ++head) {
      ws.attention.push_back({row, head, first, count, 0, last_key, -1});
    }
  }
}

template <class T>
void rotate_head(const HrStep& step, const float* cos, const float* sin, const T* x, T* out) {
  const int64_t half = step.rotary_half, rest = 2 * half;
  for (int64_t i = 0; i < half; i += VL) {
    const int64_t n = half - i;
    const vf first = load_upto(x + i, n), second = load_upto(x + half + i, n);
    const vf c = load_upto(cos + i, n), s = load_upto(sin + i, n);
    store_upto(out + i, first * c - second * s, n);
    store_upto(out + half + i, second * c + first * s, n);
  }
  if (out != x && rest < step.head_dim) std::memcpy(out + rest, x + rest, (step.head_dim - rest) * sizeof(T));
}

template <class T>
void rotate_token(const HrStep& step, int64_t layer, int64_t num_heads, T* qkv, T* query_out, int64_t query_ld,
                  int64_t token) {
  const int64_t dim = step.head_dim, kv = step.num_kv_heads * dim;
  const float* cos = step.cos + step.positions[token] * step.rotary_half;
  const float* sin = step.sin + step.positions[token] * step.rotary_half;
  T* row = qkv + token * (num_heads * dim + 2 * kv);
  for (int64_t h = 0; h < num_heads; ++h) {
    rotate_head(step, cos, sin, row + h * dim, query_out + token * query_ld + h * dim);
  }
  T* key = (T*)step.keys[layer] + step.slots[token] * kv;
  T* value = (T*)step.values[layer] + step.slots[token] * kv;
  for (int64_t h = 0; h < step.num_kv_heads; ++h) {
    rotate_head(step, cos, sin, row + (num_heads + h) * dim, key + h * dim);
  }
  std::memcpy(value, row + num_heads * dim + kv, kv * sizeof(T));
}

template <class T>
void run_task(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task) {
  if (task.num_tokens == 1 && task.first_token == 0 && task.last_key - task.first_key <= DECODE_KEYS + 16) {
    attend_decode<T>(ws, rank, call, task);
  } else {
    attend_prefill<T>(ws, rank, call, task);
  }
}

}  // namespace

void plan_attention(Workspace& ws, const HrStep& step, int64_t group) {
  if (ws.planned_step == step.serial && ws.planned_group == group) return;
  ws.attention.clear();
  ws.merges.clear();
  ws.num_partials = 0;
  for (int32_t row = 0; row < step.num_rows; ++row) {
    if (step.query_start[row + 1] - step.query_start[row] == 1) {
      plan_decode(ws, step, row);
    } else {
      plan_prefill(ws, step, row, group);
    }
  }
  // Long tasks first: what is left at the end fills the gaps.
  std::stable_sort(ws.attention.begin(), ws.attention.end(), [](const AttentionTask& a, const AttentionTask& b) {
    return int64_t(a.num_tokens) * (a.last_key - a.first_key) > int64_t(b.num_tokens) * (b.last_key - b.first_key);
  });
  ws.zeros.get<float>(round_up(step.head_dim, 2 * VL));
  ws.partials.get<float>(ws.num_partials * group * partial_stride(step));
  ws.planned_step = step.serial;
  ws.planned_group = group;
}

void attend(Team& team, Workspace& ws, const AttentionCall& call) {
  const bool wide = call.step.dtype == HR_F32;
  const auto run = wide ? run_task<float> : run_task<bf16>;
  const auto merge = wide ? merge_partials<float> : merge_partials<bf16>;
  team.each(int64_t(ws.attention.size()), 1, [&](int64_t i) { run(ws, team.rank, call, ws.attention[i]); });
  if (!ws.merges.empty()) {
    team.each_row(int64_t(ws.merges.size()), [&](int64_t i) { merge(ws, call, ws.merges[i]); });
  }
}

void rotate_and_cache(Team& team, const HrStep& step, int64_t layer, int64_t num_heads, void* qkv, void* query_out,
                      int64_t query_ld) {
  team.each_row(step.num_tokens, [&](int64_t token) {
    if (step.dtype == HR_F32) {
      rotate_token(step, layer, num_heads, (float*)qkv, (float*)query_out, query_ld, token);
    } else {
      rotate_token(step, layer, num_heads, (bf16*)qkv, (bf16*)query_out, query_ld, token);
    }
  });
}

}  // namespace headrace
