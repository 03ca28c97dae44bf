// Which rows attend to the same keys: those whose block tables begin alike. A tile of them loads, scales and transposes
// these keys once. No row's result changes by a bit: it adds up the same blocks in the same order.
#include <algorithm>

#include "attention.h"

namespace headrace {
namespace {

// A row few enough of whose queries fit into a tile that others do too.
struct Candidate {
  int32_t row;
  int32_t num_tokens;
  int64_t lanes;  // of a tile, in whole panels
  int part;       // where it has its home
  const int32_t* blocks;
  const int32_t* end;  // of those full before the step

  bool operator<(const Candidate& other) const {
    if (part != other.part) return part < other.part;
    return std::lexicographical_compare(blocks, end, other.blocks, other.end);
  }
};

// From the first on, in whole pairs of key blocks.
int64_t shared_keys(const Candidate& a, const Candidate& b, int64_t block_size) {
  const auto same = std::mismatch(a.blocks, a.end, b.blocks, b.end).first - a.blocks;
  return same * block_size / PAIR * PAIR;
}

std::vector<Candidate> find_candidates(const HrStep& step, int64_t group, int64_t queries, int threads,
                                       const std::vector<int32_t>& rows) {
  const Parts parts = cut_rows(step.num_tokens, threads);
  std::vector<Candidate> found;
  for (const int32_t row : rows) {
    const int32_t first = step.query_start[row], count = step.query_start[row + 1] - first;
    const int64_t before = step.seq_lens[row] - count, lanes = round_up(count * group, PANEL);
    if (before < PAIR || 2 * lanes > queries) continue;
    const int32_t* blocks = step.block_tables + row * step.table_width;
    found.push_back({row, count, lanes, parts.find(first), blocks, blocks + before / step.block_size});
  }
  return found;
}

void push_tiles(Workspace& ws, const HrStep& step, const Candidate* first, int32_t count, int64_t shared) {
  AttentionTask task = {Attention::TILES, first->row, 0, 0, 0, 0, 0, -1};
  task.members = int32_t(ws.members.size());
  task.num_members = count;
  task.shared_keys = int32_t(shared);
  for (const Candidate* c = first; c < first + count; ++c) {
    ws.members.push_back({c->row, 0, c->num_tokens, step.seq_lens[c->row]});
    task.num_tokens += c->num_tokens;
    task.last_key = std::max(task.last_key, step.seq_lens[c->row]);
  }
  for (; task.kv_head < step.num_kv_heads; ++task.kv_head) ws.attention.push_back(task);
}

}  // namespace

void plan_shared(Workspace& ws, const HrStep& step, int64_t group, int64_t queries, std::vector<int32_t>& rows) {
  if (rows.size() < 2) return;
  std::vector<Candidate> all = find_candidates(step, group, queries, ws.threads, rows);
  if (all.size() < 2) return;
  std::sort(all.begin(), all.end());
  int64_t lanes = 0;
  for (const Candidate& c : all) lanes += c.lanes;
  // Not so large that threads wait for the last one.
  const int64_t most = std::min(queries, lanes * step.num_kv_heads / (TILES_PER_THREAD * ws.threads));
  std::vector<bool> planned(step.num_rows);
  for (size_t begin = 0, end; begin < all.size(); begin = end) {
    int64_t shared = (all[begin].end - all[begin].blocks) * step.block_size / PAIR * PAIR;
    lanes = all[begin].lanes;
    for (end = begin + 1; end < all.size() && all[end].part == all[begin].part; ++end) {
      const int64_t both = std::min(shared, shared_keys(all[end - 1], all[end], step.block_size));
      // One more must not make fewer keys worth sharing.
      const int64_t others = int64_t(end - begin);
      if (!both || both * others < shared * (others - 1) || lanes + all[end].lanes > most) break;
      shared = both;
      lanes += all[end].lanes;
    }
    if (end - begin < 2) continue;
    push_tiles(ws, step, &all[begin], int32_t(end - begin), shared);
    for (size_t i = begin; i < end; ++i) planned[all[i].row] = true;
  }
  rows.erase(std::remove_if(rows.begin(), rows.end(), [&](int32_t row) { return planned[row]; }), rows.end());
}

}  // namespace headrace
