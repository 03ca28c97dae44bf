// Attention on the matrix kernels of tile.h, softmax online in between (FlashAttention-2, Dao 2023): tiles of query rows
// (new tokens of a sequence times the query heads of a KV head) against blocks of keys. Nothing the size of the context
// is ever copied. Sequences that begin with the same blocks may share a tile: together over these, then each by itself.
//
// Everything is transposed: scores are [keys][query rows], sums [features][query rows]. So a query row is a lane of a
// vector, its maximum and sum take no operation across lanes, and keys are multiplied as they lie in the cache.
//
// A query row's result depends on its own keys alone, bit by bit: blocks and segments begin at fixed positions, and no
// lane's arithmetic looks at another lane. So it is the same in a decode and in a prefill, however that was cut.
#include "tiled_softmax.h"

namespace headrace {
namespace {

template <class E>
void multiply_keys(const Tile<E>& t, int64_t at, int64_t band) {
  const auto [begin, end] = panels_of(t, band);
  TileJob job = {};
  job.a = (const uint8_t*)(t.keys + at * KEY_BLOCK * t.depth);
  job.lda = t.depth * sizeof(E);
  job.steps = t.depth * sizeof(E) / 4;
  job.rows = KEY_BLOCK;
  job.num_panels = int(end - begin);
  for (int p = 0; p < job.num_panels; ++p) job.panels[p] = (const uint8_t*)(t.query + (begin + p) * PANEL * t.depth);
  job.c = scores_of(t, band) + begin % 2 * PANEL;
  job.ldc = BAND;
  multiply_tile(Softmax<E>::PRODUCT, job);
}

template <class E>
void multiply_values(const Tile<E>& t, int64_t at, int64_t band) {
  const auto [begin, end] = panels_of(t, band);
  TileJob job = {};
  job.a = (const uint8_t*)(t.values + at * KEY_BLOCK * t.width);
  job.lda = KEY_BLOCK * sizeof(E);
  job.steps = KEY_BLOCK * sizeof(E) / 4;
  job.rows = t.width;
  job.num_panels = int(end - begin);
  for (int p = 0; p < job.num_panels; ++p) {
    job.panels[p] = (const uint8_t*)(t.weights + (begin + p) % 2 * PANEL * KEY_BLOCK);
  }
  job.c = t.part.acc + band * t.width * BAND + begin % 2 * PANEL;
  job.ldc = BAND;
  job.accumulate = true;
  multiply_tile(Softmax<E>::PRODUCT, job);
}

// whole += part, for some lanes of a tile. Out of line, so that decodes and prefills share its every rounding.
template <class E>
__attribute__((noinline)) void fold(const State& whole, const State& part, int64_t begin, int64_t end, int64_t width) {
  for (int64_t lane = begin; lane < end; lane += VL) {
    const vf before = load(whole.top + lane), after = load(part.top + lane), top = vmax(before, after);
    const vf keep = rescaling<E>(before, top), add = rescaling<E>(after, top);
    const int64_t at = lane / BAND * width * BAND + lane % BAND;
    for (int64_t d = 0; d < width; ++d) {
      float* sum = whole.acc + at + d * BAND;
      store(sum, load(sum) * keep + load(part.acc + at + d * BAND) * add);
    }
    store(whole.total + lane, load(whole.total + lane) * keep + load(part.total + lane) * add);
    store(whole.top + lane, top);
  }
}

// Of a member whose query rows begin at lane `start`.
template <class A>
void write_results(const State& state, const AttentionCall& call, const TileMember& member, int64_t kv_head,
                   int64_t start) {
  const int64_t group = call.group(), dim = call.step.head_dim, width = round_up(dim, 32);
  const int64_t rows = member.num_tokens * group;
  A* out = (A*)call.out + (call.step.query_start[member.row] + member.first_token) * call.out_ld +
           kv_head * group * dim;
  for (int64_t first = 0; first < rows; first += VL) {
    const int64_t lane = start + first, count = std::min<int64_t>(VL, rows - first);
    const vf factor = 1.0f / load(state.total + lane);
    const float* acc = state.acc + lane / BAND * width * BAND + lane % BAND;
    const auto row = [&](int64_t i) { return out + (first + i) / group * call.out_ld + (first + i) % group * dim; };
    int64_t d = 0;
#if defined(__AVX512BF16__)
    // Two features become one 32-bit element: half as much to transpose.
    if constexpr (sizeof(A) == 2) {
      for (; d + 2 * VL <= dim; d += 2 * VL) {
        vu block[VL];
        for (int i = 0; i < VL; ++i) {
          block[i] = pair_up(load(acc + (d + 2 * i) * BAND) * factor, load(acc + (d + 2 * i + 1) * BAND) * factor);
        }
        transpose(block);
        for (int64_t i = 0; i < count; ++i) store_as(row(i) + d, block[i]);
      }
    }
#endif
    for (; d < dim; d += VL) {
      vu block[VL];
      for (int i = 0; i < VL; ++i) block[i] = (vu)(load(acc + (d + i) * BAND) * factor);
      transpose(block);
      for (int64_t i = 0; i < count; ++i) store_upto(row(i) + d, (vf)block[i], dim - d);
    }
  }
}

#include "amx_attention.h"

// Every band that may see keys of the block. The products of the next band are under way while this one's exponentials
// are computed: the matrix unit works beside the vector units.
template <class E>
void attend_block(const Tile<E>& t, int64_t at, int64_t first, float scale) {
  const int64_t bands = ceil_div(t.last, 2);
  int64_t band = t.first / 2;
  while (t.seen[panels_of(t, band).last * PANEL - 1] <= first) ++band;
  multiply_keys(t, at, band);
  for (; band < bands; ++band) {
    if (band + 1 < bands) multiply_keys(t, at, band + 1);
    soften_band(t, first, band, scale);
    multiply_values(t, at, band);
  }
}

// One or two loaded blocks, the first of which begins at key `first`.
template <class E>
void attend_blocks(const Tile<E>& t, int64_t first, int count, float scale) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(E) == 2) {
    if (t.width == AMX_WIDTH) return amx_attend(t, first, count, scale);
  }
#endif
  for (int i = 0; i < count; ++i) attend_block(t, i, first + i * KEY_BLOCK, scale);
}

// The keys [begin, end) of a row, seen by all panels that are computed now; these have keys up to `last`. `folded` tells
// whether whole segments were gathered before.
template <class S, class E>
void attend_keys(const AttentionCall& call, Tile<E>& t, int32_t row, int32_t kv_head, int64_t begin, int64_t end,
                 int64_t last, bool& folded) {
  const float scale = Softmax<E>::UNIT / std::sqrt(float(t.dim));
  Block<S> ring[4];
  Slots slots(call.step, row, begin, kv_head);
  // The blocks from `first` on of the pair that begins there, found in the half of the ring that is theirs.
  const auto find_pair = [&](int64_t first) {
    for (int64_t i = 0; i < 2 && first + i * KEY_BLOCK < end; ++i) {
      Block<S>& block = ring[first / KEY_BLOCK % 4 + i];
      find_block(call, slots, std::min(end - first - i * KEY_BLOCK, KEY_BLOCK), block);
      // A tile of few rows waits for memory; one of many finds most in the cache.
      if (t.last - t.first <= 2) fetch_block(block, t.dim);
    }
  };
  if (begin < end) find_pair(begin);
  for (int64_t first = begin; first < end; first += PAIR) {
    const int64_t next = first + PAIR;
    if (next < end) find_pair(next);
    const int count = first + KEY_BLOCK < end ? 2 : 1;
    for (int i = 0; i < count; ++i) load_block(t, ring[first / KEY_BLOCK % 4 + i], i);
    attend_blocks(t, first, count, scale);
    if (next == segment_end(first) && next < last) {
      if (folded) {
        fold<E>(t.whole, t.part, t.first * PANEL, t.last * PANEL, t.width);
      } else {
        std::swap(t.whole, t.part);
        folded = true;
      }
      clear_part(t);
    }
  }
}

}  // namespace

template <class A, class S>
void attend_tile(Workspace& ws, int rank, const AttentionCall& call, const AttentionTask& task) {
  using E = typename Element<A>::Type;
  const int64_t group = call.group();
  const TileMember* const members = ws.members.data() + task.members;
  int64_t lanes = 0;
  for (int32_t i = 0; i < task.num_members; ++i) lanes += lanes_of(members[i], group);
  Tile<E> t = make_tile<E>(ws.thread_scratch[rank], lanes / PANEL, call.step.head_dim);
  lanes = 0;
  for (int32_t i = 0; i < task.num_members; lanes += lanes_of(members[i++], group)) {
    load_queries<A>(t, call, members[i], task.kv_head, lanes);
  }
  clear_part(t);
  bool folded = false;
  // All members go on after the keys that they share.
  attend_keys<S>(call, t, task.row, task.kv_head, task.first_key, task.shared_keys, task.shared_keys + 1, folded);
  const int64_t begin = std::max(task.first_key, task.shared_keys);
  lanes = 0;
  for (int32_t i = 0; i < task.num_members; lanes += lanes_of(members[i++], group)) {
    const TileMember& member = members[i];
    Tile<E> own = t;
    own.first = lanes / PANEL;
    own.last = own.first + lanes_of(member, group) / PANEL;
    bool own_folded = folded;
    attend_keys<S>(call, own, member.row, task.kv_head, begin, member.last_key, member.last_key, own_folded);
    if (task.partial >= 0) {
      std::memcpy(ws.partials.get<float>(0) + task.partial, own.part.acc, state_floats(1, t.width) * 4);
      return;
    }
    if (own_folded) fold<E>(own.whole, own.part, own.first * PANEL, own.last * PANEL, t.width);
    write_results<A>(own_folded ? own.whole : own.part, call, member, task.kv_head, lanes);
  }
}

template <class A>
void merge_tiles(Workspace& ws, const AttentionCall& call, const MergeTask& task) {
  using E = typename Element<A>::Type;
  const int64_t width = round_up(call.step.head_dim, 32), rows = task.num_tokens * call.group();
  float* parts = ws.partials.get<float>(0) + task.partial;
  const State whole = place_state(parts, 1, width);
  for (int64_t i = 1; i < task.count; ++i) {
    fold<E>(whole, place_state(parts + i * state_floats(1, width), 1, width), 0, rows, width);
  }
  write_results<A>(whole, call, {task.row, task.first_token, task.num_tokens, 0}, task.kv_head, 0);
}

template void attend_tile<float, float>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<float, bf16>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<float, int8_t>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<bf16, float>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<bf16, bf16>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void attend_tile<bf16, int8_t>(Workspace&, int, const AttentionCall&, const AttentionTask&);
template void merge_tiles<float>(Workspace&, const AttentionCall&, const MergeTask&);
template void merge_tiles<bf16>(Workspace&, const AttentionCall&, const MergeTask&);

}  // namespace headrace
