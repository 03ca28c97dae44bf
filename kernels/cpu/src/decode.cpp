// Attention of one query token: a pass over the cached keys and values at memory speed. The query heads of a KV head
// share it. Softmax is online (Milakov, Gimelshein 2018), so long rows split into parts that merge exactly.
#include <limits>

#include "attention.h"

namespace headrace {
namespace {

// Query heads handled at once, and vectors of the head dimension: bounded by registers.
constexpr int MAX_HEADS = 4;
constexpr int MAX_VECTORS = VL == 16 ? 4 : 2;

// A: type of queries, S: of the cache.
template <class A, class S>
struct DecodeJob {
  const A* query;  // [heads][head_dim]
  const S* keys[KEY_BLOCK];
  const S* values[KEY_BLOCK];
  float key_scales[KEY_BLOCK];  // where the cache is int8
  float value_scales[KEY_BLOCK];
  int64_t dim;
  int64_t count;           // keys in this block
  float* wide_query;       // [MAX_HEADS][padded dim]
  float* acc;              // [MAX_HEADS][padded dim]
  float scores[MAX_HEADS][KEY_BLOCK];
  float top[MAX_HEADS];    // running maximum
  float total[MAX_HEADS];  // running sum
  float rescale[MAX_HEADS];
};

// FULL: the head dimension is a multiple of two vectors, so that no load needs a length.
template <bool FULL, class T>
inline vf load_dim(const T* p, int64_t left) {
  if constexpr (FULL) {
    return load(p);
  } else {
    return load_upto(p, left);
  }
}

// Dot products of VL keys from `at` with HEADS queries.
template <class A, class S, int HEADS, bool FULL>
void dot_keys(DecodeJob<A, S>& job, int64_t at, int64_t padded) {
  vf sums[HEADS][VL];
  for (int j = 0; j < VL; ++j) {
    vf acc[HEADS] = {};
    if (at + j < job.count) {
      const S* key = job.keys[at + j];
      if constexpr (HAS_BF16_DOT && sizeof(A) == 2 && sizeof(S) == 2 && FULL) {
        for (int64_t d = 0; d < job.dim; d += 2 * VL) {
          const vu k = load_as<vu>(key + d);
          for (int h = 0; h < HEADS; ++h) acc[h] = dot2(acc[h], load_as<vu>(job.query + h * job.dim + d), k);
        }
      } else {
        for (int64_t d = 0; d < job.dim; d += VL) {
          const vf k = load_dim<FULL>(key + d, job.dim - d);
          for (int h = 0; h < HEADS; ++h) acc[h] += load(job.wide_query + h * padded + d) * k;
        }
      }
    }
    for (int h = 0; h < HEADS; ++h) sums[h][j] = acc[h];
  }
  for (int h = 0; h < HEADS; ++h) store(job.scores[h] + at, sum_each(sums[h]));
}

// Scores -> weights relative to the running maximum.
template <class A, class S>
void soften(DecodeJob<A, S>& job, int heads, float scale) {
  const int64_t padded = round_up(job.count, VL);
  for (int h = 0; h < heads; ++h) {
    float* scores = job.scores[h];
    if constexpr (sizeof(S) == 1) {
      for (int64_t i = 0; i < padded; i += VL) store(scores + i, load(scores + i) * load(job.key_scales + i));
    }
    for (int64_t i = job.count; i < padded; ++i) scores[i] = -std::numeric_limits<float>::infinity();
    vf top = splat(job.top[h]);
    for (int64_t i = 0; i < padded; i += VL) {
      const vf scaled = load(scores + i) * scale;
      store(scores + i, scaled);
      top = vmax(scaled, top);
    }
    const float highest = max_lanes(top);
    vf sum = {};
    for (int64_t i = 0; i < padded; i += VL) {
      vf weight = vexp(load(scores + i) - highest);
      sum += weight;
      if constexpr (sizeof(S) == 1) weight *= load(job.value_scales + i);
      store(scores + i, weight);
    }
    job.rescale[h] = std::exp(job.top[h] - highest);
    job.total[h] = job.total[h] * job.rescale[h] + sum_lanes(sum);
    job.top[h] = highest;
  }
}

template <class A, class S, int HEADS, int VECTORS, bool FULL>
void add_values(DecodeJob<A, S>& job, int64_t d, int64_t padded) {
  vf acc[HEADS][VECTORS];
  for (int h = 0; h < HEADS; ++h) {
    for (int v = 0; v < VECTORS; ++v) acc[h][v] = load(job.acc + h * padded + d + v * VL) * job.rescale[h];
  }
  for (int64_t j = 0; j < job.count; ++j) {
    vf value[VECTORS];
    for (int v = 0; v < VECTORS; ++v) value[v] = load_dim<FULL>(job.values[j] + d + v * VL, job.dim - d - v * VL);
    for (int h = 0; h < HEADS; ++h) {
      const float weight = job.scores[h][j];
      for (int v = 0; v < VECTORS; ++v) acc[h][v] += value[v] * weight;
    }
  }
  for (int h = 0; h < HEADS; ++h) {
    for (int v = 0; v < VECTORS; ++v) store(job.acc + h * padded + d + v * VL, acc[h][v]);
  }
}

template <class A, class S, int HEADS, bool FULL>
void decode_heads(const AttentionCall& call, const AttentionTask& task, const A* query, float* scratch,
                  DecodeJob<A, S>& job) {
  const HrStep& step = call.step;
  const int64_t dim = step.head_dim, padded = round_up(dim, VL);
  const float scale = 1.0f / std::sqrt(float(dim));
  job.query = query;
  job.dim = dim;
  job.wide_query = scratch;
  job.acc = scratch + HEADS * padded;
  std::memset(job.acc, 0, HEADS * padded * 4);
  for (int h = 0; h < HEADS; ++h) {
    widen_row(query + h * dim, dim, padded, job.wide_query + h * padded);
    job.top[h] = -std::numeric_limits<float>::infinity();
    job.total[h] = 0.0f;
  }
  Slots slots(step, task.row, task.first_key, task.kv_head), ahead = slots;
  // The block from `first` on, into the cache.
  const auto fetch = [&](int64_t first) {
    for (int64_t j = first; j < task.last_key && j < first + KEY_BLOCK; ++j) {
      const int64_t offset = ahead.next();
      for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(S))) {
        __builtin_prefetch((const S*)step.keys[call.layer] + offset + d);
        __builtin_prefetch((const S*)step.values[call.layer] + offset + d);
      }
    }
  };
  fetch(task.first_key);
  for (int64_t first = task.first_key; first < task.last_key; first += KEY_BLOCK) {
    job.count = task.last_key - first < KEY_BLOCK ? task.last_key - first : KEY_BLOCK;
    fetch(first + KEY_BLOCK);
    for (int64_t j = 0; j < job.count; ++j) {
      const int64_t offset = slots.next();
      job.keys[j] = (const S*)step.keys[call.layer] + offset;
      job.values[j] = (const S*)step.values[call.layer] + offset;
      if constexpr (sizeof(S) == 1) {
        job.key_scales[j] = step.key_scales[call.layer][offset / dim];
        job.value_scales[j] = step.value_scales[call.layer][offset / dim];
      }
    }
    for (int64_t j = job.count; j < KEY_BLOCK; ++j) job.key_scales[j] = job.value_scales[j] = 0.0f;
    for (int64_t j = 0; j < job.count; j += VL) dot_keys<A, S, HEADS, FULL>(job, j, padded);
    soften(job, HEADS, scale);
    int64_t d = 0;
    for (; d + MAX_VECTORS * VL <= padded; d += MAX_VECTORS * VL) add_values<A, S, HEADS, MAX_VECTORS, FULL>(job, d, padded);
    for (; d < padded; d += VL) add_values<A, S, HEADS, 1, FULL>(job, d, padded);
  }
}

template <class A, class S, bool FULL>
auto pick_heads(int heads) {
  return heads == 1   ? decode_heads<A, S, 1, FULL>
         : heads == 2 ? decode_heads<A, S, 2, FULL>
         : heads == 3 ? decode_heads<A, S, 3, FULL>
                      : decode_heads<A, S, 4, FULL>;
}

template <class T>
void write_result(const float* acc, float factor, int64_t dim, T* out) {
  for (int64_t d = 0; d < dim; d += VL) store_upto(out + d, load(acc + d) * factor, dim - d);
}

}  // namespace

template <class A, class S>
void attend_decode(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task) {
  const HrStep& step = call.step;
  const int64_t dim = step.head_dim, padded = round_up(dim, VL), group = call.group();
  const int64_t token = step.query_start[task.row], first_head = task.kv_head * group;
  const A* query = (const A*)call.query + token * call.query_ld + first_head * dim;
  A* out = (A*)call.out + token * call.out_ld + first_head * dim;
  float* scratch = ws.thread_scratch[rank].get<float>(2 * MAX_HEADS * padded);
  DecodeJob<A, S> job;
  for (int64_t head = 0; head < group; head += MAX_HEADS) {
    const int heads = int(group - head < MAX_HEADS ? group - head : MAX_HEADS);
    const auto run = dim % (2 * VL) == 0 ? pick_heads<A, S, true>(heads) : pick_heads<A, S, false>(heads);
    run(call, task, query + head * dim, scratch, job);
    for (int h = 0; h < heads; ++h) {
      if (task.partial < 0) {
        write_result(job.acc + h * padded, 1.0f / job.total[h], dim, out + (head + h) * dim);
        continue;
      }
      float* partial = ws.partials.get<float>(0) + task.partial + (head + h) * decode_partial(step);
      partial[0] = job.top[h];
      partial[1] = job.total[h];
      std::memcpy(partial + 2, job.acc + h * padded, padded * 4);
    }
  }
}

template <class A>
void merge_decode(Workspace& ws, const AttentionCall& call, const MergeTask& task) {
  const HrStep& step = call.step;
  const int64_t dim = step.head_dim, group = call.group(), stride = decode_partial(step);
  A* out = (A*)call.out + step.query_start[task.row] * call.out_ld + task.kv_head * group * dim;
  for (int64_t head = 0; head < group; ++head) {
    const float* parts = ws.partials.get<float>(0) + task.partial + head * stride;
    const int64_t next = group * stride;
    float top = parts[0], total = 0.0f;
    for (int32_t i = 1; i < task.count; ++i) top = std::fmax(top, parts[i * next]);
    for (int32_t i = 0; i < task.count; ++i) total += std::exp(parts[i * next] - top) * parts[i * next + 1];
    for (int64_t d = 0; d < dim; d += VL) {
      vf sum = {};
      for (int32_t i = 0; i < task.count; ++i) {
        sum += load(parts + i * next + 2 + d) * std::exp(parts[i * next] - top);
      }
      store_upto(out + head * dim + d, sum * (1.0f / total), dim - d);
    }
  }
}

template void attend_decode<float, float>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_decode<float, bf16>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_decode<float, int8_t>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_decode<bf16, float>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_decode<bf16, bf16>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_decode<bf16, int8_t>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void merge_decode<float>(Workspace&, const AttentionCall&, const MergeTask&);
template void merge_decode<bf16>(Workspace&, const AttentionCall&, const MergeTask&);

}  // namespace headrace
