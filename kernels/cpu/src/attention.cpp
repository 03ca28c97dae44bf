#include "attention.h"

#include <algorithm>

namespace headrace {
namespace {

// Rows times KV heads per thread from which on there is no need to split a row.
constexpr int64_t ENOUGH_TASKS = 4;

// Rows of one token by vectors. Parts depend on the row alone.
void plan_decode(Workspace& ws, const HrStep& step, int32_t row, int64_t group) {
  const int32_t length = step.seq_lens[row];
  // Even parts of whole vectors, so that the last one is not a stub.
  const int64_t parts = ceil_div(length, DECODE_KEYS), floats = group * decode_partial(step);
  const int32_t keys = int32_t(round_up(ceil_div(length, parts), 16));
  for (int32_t head = 0; head < step.num_kv_heads; ++head) {
    if (parts > 1) {
      ws.merges.push_back({false, row, head, 0, 1, int32_t(ceil_div(length, keys)), ws.partial_floats});
    }
    for (int32_t first = 0; first < length; first += keys) {
      ws.attention.push_back({Attention::VECTORS, row, head, 0, 1, first, std::min(first + keys, length), -1});
      if (parts == 1) continue;
      ws.attention.back().partial = ws.partial_floats;
      ws.partial_floats += floats;
    }
  }
}

// Rows of one token by streams; `split` into one a KV head, which changes no bit.
void plan_stream(Workspace& ws, const HrStep& step, int32_t row, int64_t group, bool split) {
  const int32_t length = step.seq_lens[row], heads = int32_t(step.num_kv_heads), each = split ? 1 : heads;
  const int32_t keys = int32_t(round_up(ceil_div(length, ceil_div(length, STREAM_KEYS)), KEY_BLOCK));
  const int32_t parts = int32_t(ceil_div(length, keys));
  const int64_t floats = group * decode_partial(step), stride = parts * floats;
  for (int32_t part = 0; part < parts; ++part) {
    for (int32_t head = 0; head < heads; head += each) {
      const int64_t partial = parts == 1 ? -1 : ws.partial_floats + head * stride + part * floats;
      const int32_t first = part * keys;
      ws.attention.push_back(
          {Attention::STREAM, row, head, 0, 1, first, std::min(first + keys, length), partial, each, stride});
    }
  }
  if (parts == 1) return;
  for (int32_t head = 0; head < heads; ++head) {
    ws.merges.push_back({false, row, head, 0, 1, parts, ws.partial_floats + head * stride});
  }
  ws.partial_floats += heads * stride;
}

// Query rows of this batch's tiles. A row's result does not depend on which others share its tile.
int64_t tile_queries(const HrStep& step, int64_t group, int threads) {
  const int64_t all = step.query_start[step.num_rows] * group * step.num_kv_heads;
  int64_t queries = MOST_TILE_QUERIES;
  while (queries > TILE_QUERIES &&
         (queries * step.head_dim > TILE_FEATURES || all < TILES_PER_THREAD * threads * queries)) {
    queries /= 2;
  }
  return queries;
}

// Tile of one row over some of its keys.
void push_tile(Workspace& ws, const TileMember& member, int32_t kv_head, int32_t first_key, int64_t partial) {
  AttentionTask task = {Attention::TILES,  member.row, kv_head,         member.first_token,
                        member.num_tokens, first_key,  member.last_key, partial};
  task.members = int32_t(ws.members.size());
  task.num_members = 1;
  ws.members.push_back(member);
  ws.attention.push_back(task);
}

// split: spreads a tile's segments over threads where its queries are few. The result has the same bits either way.
void plan_tiles(Workspace& ws, const HrStep& step, int32_t row, int64_t group, int64_t queries, bool split) {
  const int32_t tokens = step.query_start[row + 1] - step.query_start[row];
  const int32_t tile = int32_t(std::max<int64_t>(1, queries / group));
  for (int32_t first = 0; first < tokens; first += tile) {
    const int32_t count = std::min(tile, tokens - first), last_key = step.seq_lens[row] - tokens + first + count;
    for (int32_t head = 0; head < step.num_kv_heads; ++head) {
      if (!split || count * group > BAND || last_key <= segment_end(0)) {
        push_tile(ws, {row, first, count, last_key}, head, 0, -1);
        continue;
      }
      ws.merges.push_back({true, row, head, first, count, 0, ws.partial_floats});
      for (int32_t key = 0; key < last_key; ++ws.merges.back().count) {
        const int32_t end = int32_t(std::min<int64_t>(segment_end(key), last_key));
        push_tile(ws, {row, first, count, end}, head, key, ws.partial_floats);
        ws.partial_floats += state_floats(1, round_up(step.head_dim, 32));
        key = end;
      }
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

template <class T, class S>
float store_head(const T* x, int64_t dim, S* to) {
  for (int64_t i = 0; i < dim; i += VL) store_upto(to + i, load_upto(x + i, dim - i), dim - i);
  return 0.0f;
}

// One scale per token and head. Returns it.
template <class T>
float store_head(const T* x, int64_t dim, int8_t* to) {
  vf largest = {}, poison = {};
  for (int64_t i = 0; i < dim; i += VL) {
    const vf part = load_upto(x + i, dim - i);
    largest = vmax(vabs(part), largest);
    poison += part - part;
  }
  // A row that is not finite gets a scale that is not: it must not turn into a sane one.
  const float magnitude = max_lanes(largest) + sum_lanes(poison);
  const float inverse = magnitude > 0.0f ? 127.0f / magnitude : 0.0f;
  for (int64_t i = 0; i < dim; i += VL) {
    int8_t rounded[VL];
    const bool whole = dim - i >= VL;
    store_rounded(load_upto(x + i, dim - i) * inverse, whole ? to + i : rounded);
    if (!whole) std::memcpy(to + i, rounded, dim - i);
  }
  return magnitude / 127.0f;
}

struct CacheRow {
  const HrStep& step;
  int64_t layer;
  int64_t slot;
};

// Head h of a token's keys and values [kv heads, dim] -> its slot.
template <class T, class S>
void write_head(const CacheRow& at, int64_t h, const T* key, const T* value) {
  const HrStep& step = at.step;
  const int64_t dim = step.head_dim, head = at.slot * step.num_kv_heads + h;
  const float key_scale = store_head(key + h * dim, dim, (S*)step.keys[at.layer] + head * dim);
  const float value_scale = store_head(value + h * dim, dim, (S*)step.values[at.layer] + head * dim);
  if constexpr (sizeof(S) == 1) {
    step.key_scales[at.layer][head] = key_scale;
    step.value_scales[at.layer][head] = value_scale;
  }
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
  T *key = row + num_heads * dim, *value = key + kv;
  for (int64_t h = 0; h < step.num_kv_heads; ++h) rotate_head(step, cos, sin, key + h * dim, key + h * dim);
  const CacheRow at = {step, layer, step.slots[token]};
  for (int64_t h = 0; h < step.num_kv_heads; ++h) {
    switch (step.cache_dtype) {
      case HR_F32:
        write_head<T, float>(at, h, key, value);
        break;
      case HR_BF16:
        write_head<T, bf16>(at, h, key, value);
        break;
      default:
        write_head<T, int8_t>(at, h, key, value);
    }
  }
}

template <class A, class S>
void run_task(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task,
              const AttentionTask* next) {
  switch (task.kind) {
    case Attention::VECTORS:
      return attend_decode<A, S>(ws, rank, call, task);
    case Attention::TILES:
      return attend_tile<A, S>(ws, rank, call, task);
    case Attention::STREAM:
      return attend_stream(ws, rank, call, task, next);
  }
}

template <class A>
auto pick_task(int64_t cache_dtype) {
  return cache_dtype == HR_F32 ? run_task<A, float> : cache_dtype == HR_BF16 ? run_task<A, bf16> : run_task<A, int8_t>;
}

template <class A>
void run_merge(Workspace& ws, const AttentionCall& call, const MergeTask& task) {
  task.tiled ? merge_tiles<A>(ws, call, task) : merge_decode<A>(ws, call, task);
}

}  // namespace

void plan_attention(Workspace& ws, const HrStep& step, int64_t group) {
  if (ws.planned_step == step.serial && ws.planned_group == group) return;
  ws.attention.clear();
  ws.members.clear();
  ws.merges.clear();
  ws.partial_floats = 0;
  // In invariant mode decodes too go to tiles: then a token does not notice whether it is computed alone or in a prompt.
  const bool streams = !ws.invariant && can_stream(step, group);
  const bool all_tiled = ws.invariant || (HAS_AMX && step.dtype == HR_BF16);
  const bool split = step.num_rows * step.num_kv_heads < ENOUGH_TASKS * ws.threads;
  const int64_t queries = tile_queries(step, group, ws.threads);
  std::vector<int32_t> tiled;
  for (int32_t row = 0; row < step.num_rows; ++row) {
    const bool single = step.query_start[row + 1] - step.query_start[row] == 1;
    if (single && streams) {
      plan_stream(ws, step, row, group, split);
    } else if (single && !all_tiled) {
      plan_decode(ws, step, row, group);
    } else {
      tiled.push_back(row);
    }
  }
  if (!split) plan_shared(ws, step, group, queries, tiled);
  for (const int32_t row : tiled) plan_tiles(ws, step, row, group, queries, split);
  // In each part long tasks first: what is left at the end fills the gaps.
  const Parts rows = cut_rows(step.num_tokens, ws.threads);
  const auto part = [&](const AttentionTask& t) { return rows.find(step.query_start[t.row] + t.first_token); };
  const auto work = [](const AttentionTask& t) {
    return int64_t(t.num_tokens) * t.num_kv_heads * (t.last_key - t.first_key);
  };
  std::stable_sort(ws.attention.begin(), ws.attention.end(), [&](const AttentionTask& a, const AttentionTask& b) {
    return std::pair(part(a), -work(a)) < std::pair(part(b), -work(b));
  });
  ws.attention_parts = {};
  ws.attention_parts.count = rows.count;
  for (const AttentionTask& task : ws.attention) ++ws.attention_parts.bounds[part(task) + 1];
  for (int i = 0; i < rows.count; ++i) ws.attention_parts.bounds[i + 1] += ws.attention_parts.bounds[i];
  ws.partials.get<float>(ws.partial_floats);
  ws.planned_step = step.serial;
  ws.planned_group = group;
}

void attend(Team& team, Workspace& ws, const AttentionCall& call) {
  const bool wide = call.step.dtype == HR_F32;
  const auto run = wide ? pick_task<float>(call.step.cache_dtype) : pick_task<bf16>(call.step.cache_dtype);
  const auto merge = wide ? run_merge<float> : run_merge<bf16>;
  // The next task of this thread is most likely as many tasks on as there are threads.
  const int64_t count = int64_t(ws.attention.size());
  team.each(ws.attention_parts, 1, [&](int64_t i) {
    const AttentionTask* next = i + team.size < count ? &ws.attention[i + team.size] : nullptr;
    run(ws, team.rank, call, ws.attention[i], next);
  });
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
