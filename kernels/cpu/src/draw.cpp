// A row is passed over once: weights, their sums and maxima by chunks. Rows with filters keep the weights, look for the
// smallest that stays among those that may, and pass over the chunks that have one. Nothing is sorted.
#include "draw.h"

#include <algorithm>
#include <vector>

#include "team.h"
#include "vmath.h"

namespace headrace {
namespace {

constexpr int64_t FAN = 16, CHUNK = FAN * FAN, LEVELS = 4;
// Sums of single-precision numbers are a little off: a bound that much lower holds all the same.
constexpr double SAFE = 0.99;
constexpr size_t FEW = 24;
constexpr int64_t MANY = 256;
// Weights up to the best one's, 1, have bits up to 0x3f800000.
constexpr int STEP_SHIFT = 20;
constexpr size_t STEPS = (0x3f800000u >> STEP_SHIFT) + 1;

struct Chunk {
  double sum = 0.0;
  float largest = 0.0f;
};

// One row and what is known of it; its memory is used again for the thread's next row.
class Row {
 public:
  void begin(const float* logits, int64_t words, float peak, float temperature, float* weights) {
    logits_ = logits;
    words_ = words;
    peak_ = peak;
    temperature_ = temperature;
    weights_ = weights;
    chunks_.assign(size_t((words + CHUNK - 1) / CHUNK), Chunk{});
    alignas(64) float passing[CHUNK];
    for (size_t c = 0; c < chunks_.size(); ++c) chunks_[c] = weigh(int64_t(c), weights_ ? at(c) : passing);
  }

  void filter(int64_t top_k, double top_p, double min_p) {
    const int64_t limit = top_k > 0 && top_k < words_ ? top_k : 0;
    float threshold = float(min_p);
    if (limit || top_p < 1.0) threshold = std::max(threshold, smallest_kept(limit, top_p));
    for (size_t c = 0; c < chunks_.size(); ++c) {
      // Its weights stay as they are: nothing is drawn from a chunk without any.
      if (chunks_[c].largest < threshold) {
        chunks_[c].sum = 0.0;
        continue;
      }
      float* w = at(c);
      vf sum{};
      for (int64_t i = 0; i < CHUNK; i += VL) {
        const vf all = load(w + i), kept = (vf)((vi)all & (all >= splat(threshold)));
        store(w + i, kept);
        sum += kept;
      }
      chunks_[c].sum = total(sum);
    }
  }

  int64_t pick(const double* unit) {
    double groups[FAN], sums[FAN], chosen[CHUNK];
    const int64_t per = FAN, count = int64_t(chunks_.size());
    groups_.clear();
    for (int64_t first = 0; first < count; first += per) {
      double sum = 0.0;
      for (int64_t c = first; c < std::min(count, first + per); ++c) sum += chunks_[size_t(c)].sum;
      groups_.push_back(sum);
    }
    const int64_t group = place(groups_.data(), int64_t(groups_.size()), unit[0]);
    for (int64_t i = 0; i < FAN; ++i) sums[i] = group * FAN + i < count ? chunks_[size_t(group * FAN + i)].sum : 0.0;
    const int64_t chunk = group * FAN + place(sums, FAN, unit[1]);
    alignas(64) float again[CHUNK];
    const float* w = weights_ ? at(size_t(chunk)) : again;
    if (!weights_) weigh(chunk, again);
    for (int64_t i = 0; i < CHUNK; ++i) chosen[i] = w[i];
    for (int64_t part = 0; part < FAN; ++part) {
      groups[part] = 0.0;
      for (int64_t i = 0; i < FAN; ++i) groups[part] += chosen[part * FAN + i];
    }
    const int64_t part = place(groups, FAN, unit[2]);
    return chunk * CHUNK + part * FAN + place(chosen + part * FAN, FAN, unit[3]);
  }

 private:
  float* at(size_t chunk) const { return weights_ + int64_t(chunk) * CHUNK; }

  static double total(vf lanes) {
    double sum = 0.0;
    for (int i = 0; i < VL; ++i) sum += double(lanes[i]);
    return sum;
  }

  // Weights of a chunk, zero past the last word.
  Chunk weigh(int64_t chunk, float* out) const {
    const float* from = logits_ + chunk * CHUNK;
    const int64_t inside = std::min(CHUNK, words_ - chunk * CHUNK);
    vf sum{}, most{};
    for (int64_t i = 0; i < CHUNK; i += VL) {
      vf x;
      if (i + VL <= inside) {
        x = load(from + i);
      } else {
        float lanes[VL];
        for (int64_t l = 0; l < VL; ++l) lanes[l] = i + l < inside ? from[i + l] : -INFINITY;
        x = load(lanes);
      }
      x = x - splat(peak_);
      if (temperature_ != 1.0f) x = x / splat(temperature_);
      const vf w = vexp(x);
      store(out + i, w);
      sum += w;
      most = vmax(w, most);
    }
    Chunk seen{total(sum), 0.0f};
    for (int i = 0; i < VL; ++i) seen.largest = std::max(seen.largest, most[i]);
    return seen;
  }

  // The first of n places at which the running sum exceeds `unit` of the whole, never past what reaches it: so never one
  // of weight 0.
  static int64_t place(const double* weights, int64_t n, double unit) {
    double whole = 0.0, running = 0.0;
    for (int64_t i = 0; i < n; ++i) whole += weights[i];
    const double target = unit * whole;
    int64_t below = 0, last = 0;
    for (int64_t i = 0; i < n; ++i) {
      running += weights[i];
      below += running <= target;
      last += running < whole;
    }
    return std::min(below, last);
  }

  // Weight of the last token that is among the `limit` best (0: all) and in their smallest set of probability top_p.
  float smallest_kept(int64_t limit, double top_p) {
    double mass = 0.0;
    for (const Chunk& chunk : chunks_) mass += chunk.sum;
    // All tokens below it together have less than what top_p cuts off.
    const float least = limit ? rank_bound(limit) : float(SAFE * (1.0 - top_p) * mass / double(words_));
    candidates_.resize(chunks_.size() * CHUNK);
    float *begin = candidates_.data(), *end = begin;
    for (size_t c = 0; c < chunks_.size(); ++c) {
      if (chunks_[c].largest >= least) end = append(at(c), CHUNK, least, INFINITY, end);
    }
    if (limit) {
      // Padding has weight 0 and may be among them, past the last word.
      std::nth_element(begin, begin + limit - 1, end, std::greater<float>());
      end = begin + limit;
      if (top_p >= 1.0) return end[-1];
      mass = 0.0;
      for (const float* w = begin; w < end; ++w) mass += double(*w);
    }
    return nucleus_end(begin, end, top_p * mass);
  }

  // Those in [low, high) go to `out` -> behind the last. Written without a branch: which they are is hard to foretell.
  static float* append(const float* w, int64_t count, float low, float high, float* out) {
    for (int64_t i = 0; i < count; ++i) {
      const float weight = w[i];
      *out = weight;
      out += (weight >= low) & (weight < high);
    }
    return out;
  }

  // At least `limit` weights of the row are this large: as many chunks have a maximum that is.
  float rank_bound(int64_t limit) {
    candidates_.clear();
    if (limit <= int64_t(chunks_.size())) {
      for (const Chunk& chunk : chunks_) candidates_.push_back(chunk.largest);
    } else {
      candidates_.assign(weights_, weights_ + words_);
    }
    std::nth_element(candidates_.begin(), candidates_.begin() + (limit - 1), candidates_.end(), std::greater<float>());
    return candidates_[size_t(limit - 1)];
  }

  // From the largest on, the weight with which their sum reaches `wanted`; the smallest where it never does. Not empty:
  // the best token is always one. Many are first sorted into steps of an eighth of a power of two, by their bits, and
  // only the step that it lies in is looked through.
  float nucleus_end(float* begin, float* end, double wanted) {
    double above = 0.0;
    if (end - begin > MANY) {
      steps_.assign(STEPS, 0.0);
      for (const float* w = begin; w < end; ++w) steps_[step_of(*w)] += double(*w);
      size_t step = STEPS - 1;
      for (; step > 0 && above + steps_[step] < wanted; --step) above += steps_[step];
      while (steps_[step] == 0.0) above -= steps_[++step];  // past the last one that has any
      end = append(begin, end - begin, floor_of(step), floor_of(step + 1), begin);
    }
    return reach(begin, end, above, wanted);
  }

  static size_t step_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return std::min<size_t>(bits >> STEP_SHIFT, STEPS - 1);
  }

  // The smallest weight of a step.
  static float floor_of(size_t step) {
    if (step >= STEPS) return INFINITY;
    const uint32_t bits = uint32_t(step) << STEP_SHIFT;
    float weight;
    std::memcpy(&weight, &bits, 4);
    return weight;
  }

  // The same, by leaving out parts as in quickselect that it surely is not in. `above`: the sum of larger ones.
  static float reach(float* begin, float* end, double above, double wanted) {
    while (size_t(end - begin) > FEW) {
      const float a = begin[0], b = begin[(end - begin) / 2], c = end[-1];
      const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
      float* equal = std::partition(begin, end, [=](float w) { return w > pivot; });
      float* lower = std::partition(equal, end, [=](float w) { return w == pivot; });
      double larger = above;
      for (const float* w = begin; w < equal; ++w) larger += double(*w);
      if (equal > begin && larger >= wanted) {
        end = equal;
        continue;
      }
      const double through = larger + double(pivot) * double(lower - equal);
      if (through >= wanted || lower == end) return pivot;
      above = through;
      begin = lower;
    }
    std::sort(begin, end, std::greater<float>());
    for (; begin + 1 < end; ++begin) {
      above += double(*begin);
      if (above >= wanted) break;
    }
    return *begin;
  }

  const float* logits_ = nullptr;
  int64_t words_ = 0;
  float peak_ = 0.0f, temperature_ = 1.0f;
  float* weights_ = nullptr;  // null: they are not kept
  std::vector<Chunk> chunks_;
  std::vector<double> groups_;
  std::vector<float> candidates_;
  std::vector<double> steps_;
};

}  // namespace

int64_t draw_width(int64_t words) { return (words + CHUNK - 1) / CHUNK * CHUNK; }

void draw(const float* logits, int64_t rows, int64_t words, const Draws& by, float* scratch, int64_t* tokens,
          int threads) {
  const int64_t width = draw_width(words);
  parallel(int(std::min<int64_t>(threads, rows)), [&](Team team) {
    Row row;
    team.each(rows, 1, [&](int64_t r) {
      const bool limited = by.top_k[r] > 0 && by.top_k[r] < words;
      const bool filters = limited || by.top_p[r] < 1.0 || by.min_p[r] > 0.0;
      row.begin(logits + r * words, words, by.peak[r], by.temperature[r], filters ? scratch + r * width : nullptr);
      if (filters) row.filter(by.top_k[r], by.top_p[r], by.min_p[r]);
      tokens[r] = row.pick(by.unit + r * LEVELS);
    });
  });
}

}  // namespace headrace
