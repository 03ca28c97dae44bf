// Packing at load: plain rows or GGUF blocks in, panels out (weights.h). Whoever starts a server waits for it.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "hadamard.h"
#include "team.h"
#include "weights.h"

namespace headrace {
namespace {

struct Rows {
  int64_t source;
  const void* data;
  int64_t features;
  int64_t depth;

  // Zero outside the matrix: padding features and padding depth.
  float at(int64_t feature, int64_t k) const {
    if (feature >= features || k >= depth) return 0.0f;
    const int64_t i = feature * depth + k;
    return source == HR_F32 ? ((const float*)data)[i] : widen(((const bf16*)data)[i]);
  }
};

float half_to_float(uint16_t half) {
  uint16_t lanes[VL] = {half};
  return load_half(lanes)[0];
}

uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  float magnitude = std::fabs(x);
  if (!(magnitude < 65504.0f)) return uint16_t(sign | 0x7bff);  // saturate: a scale must stay finite
  if (magnitude < 6.103515625e-05f) return uint16_t(sign | uint32_t(std::nearbyint(magnitude * 16777216.0f)));
  std::memcpy(&bits, &magnitude, 4);
  bits += 0xfff + ((bits >> 13) & 1);
  return uint16_t(sign | ((bits - 0x38000000u) >> 13));
}

// 32-bit words of a panel's 16 features, one row after the other, `stride` words apart -> the words of each step side by
// side. Every format's steps are that: two bf16, four bytes, one float32 a word.
void interleave(const void* rows, int64_t stride, int64_t words, uint8_t* dst) {
  for (int64_t w = 0; w < words; ++w) {
    uint32_t step[PANEL];
    for (int lane = 0; lane < PANEL; ++lane) step[lane] = load_as<uint32_t>((const uint32_t*)rows + lane * stride + w);
    std::memcpy(dst + w * STEP_BYTES, step, STEP_BYTES);
  }
}

// Elements k to k + count of one feature as T, zero outside the matrix.
template <class T>
void read_row(const Rows& rows, int64_t feature, int64_t k, int64_t count, T* out) {
  const int64_t inside = feature < rows.features ? std::min(count, std::max<int64_t>(0, rows.depth - k)) : 0;
  const int64_t from = feature * rows.depth + k;
  if ((rows.source == HR_F32) == std::is_same_v<T, float>) {
    std::memcpy(out, (const T*)rows.data + from, size_t(inside) * sizeof(T));
  } else if (rows.source == HR_F32) {
    for (int64_t i = 0; i < inside; ++i) narrow_to(((const float*)rows.data)[from + i], out + i);
  } else {
    for (int64_t i = 0; i < inside; ++i) narrow_to(widen(((const bf16*)rows.data)[from + i]), out + i);
  }
  for (int64_t i = inside; i < count; ++i) out[i] = T{};
}

// Through pieces of rows that stay in the first-level cache.
template <class T>
void pack_float_panel(const Rows& rows, int64_t panel, uint8_t* dst) {
  constexpr int64_t WORDS = 128, PIECE = WORDS * 4 / sizeof(T);
  const int64_t padded = padded_depth(rows.depth);
  alignas(64) T staged[PANEL * PIECE];
  for (int64_t k = 0; k < padded; k += PIECE) {
    const int64_t count = std::min(PIECE, padded - k);
    for (int lane = 0; lane < PANEL; ++lane) read_row(rows, panel * PANEL + lane, k, count, staged + lane * PIECE);
    interleave(staged, WORDS, count * WORDS / PIECE, dst + k * int64_t(sizeof(T)) * PANEL);
  }
}

void pack_int8_panel(const Rows& rows, int64_t panel, uint8_t* dst, float* scales) {
  const int64_t padded = padded_depth(rows.depth);
  std::vector<float> row(padded);
  std::vector<uint8_t> codes(PANEL * padded);
  for (int lane = 0; lane < PANEL; ++lane) {
    read_row(rows, panel * PANEL + lane, 0, padded, row.data());
    rotate_row(row.data(), padded);
    vf most{};
    for (int64_t k = 0; k < padded; k += VL) most = vmax(vabs(load(row.data() + k)), most);
    float largest = 0.0f;
    for (int i = 0; i < VL; ++i) largest = std::fmax(largest, most[i]);
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    scales[lane] = largest / 127.0f;
    uint8_t* out = codes.data() + lane * padded;
    for (int64_t k = 0; k < padded; ++k) out[k] = uint8_t(int(std::nearbyint(row[k] * inverse)) + INT8_OFFSET);
  }
  interleave(codes.data(), padded / 4, padded / 4, dst);
}

// One group of one feature: unsigned codes, scale and minimum.
struct Group {
  uint8_t codes[GROUP];
  uint16_t scale = 0;
  uint16_t minimum = 0;
};

// As llama.cpp quantizes: Q8_0 by the largest magnitude, Q4_0 so that it becomes -8, Q4_1 from minimum to maximum.
Group quantize_group(const Rows& rows, int64_t format, int64_t feature, int64_t group) {
  float x[GROUP], low = INFINITY, high = -INFINITY, extreme = 0.0f;
  for (int k = 0; k < GROUP; ++k) {
    x[k] = rows.at(feature, group * GROUP + k);
    low = std::fmin(low, x[k]);
    high = std::fmax(high, x[k]);
    if (std::fabs(x[k]) > std::fabs(extreme)) extreme = x[k];
  }
  Group out;
  const float scale = format == HR_W_Q8_0   ? std::fabs(extreme) / 127.0f
                      : format == HR_W_Q4_0 ? extreme / -8.0f
                                            : (high - low) / 15.0f;
  out.scale = float_to_half(scale);
  const float stored = half_to_float(out.scale), inverse = stored != 0.0f ? 1.0f / stored : 0.0f;
  float offset = format == HR_W_Q8_0 ? float(INT8_OFFSET) : 8.0f, bottom = format == HR_W_Q8_0 ? 1.0f : 0.0f;
  if (format == HR_W_Q4_1) {
    out.minimum = float_to_half(low);
    offset = -half_to_float(out.minimum) * inverse;
  }
  const float top = format == HR_W_Q8_0 ? 255.0f : 15.0f;
  for (int k = 0; k < GROUP; ++k) {
    out.codes[k] = uint8_t(std::fmin(top, std::fmax(bottom, std::nearbyint(x[k] * inverse + offset))));
  }
  return out;
}

// GGUF's nibbles lie as ours: the low one of byte i is element i, the high one element i + 16.
void pack_block_panel(const Rows& rows, int64_t format, int64_t panel, uint8_t* dst) {
  const int64_t groups = padded_depth(rows.depth) / GROUP, words = format == HR_W_Q8_0 ? 8 : 4;
  const int64_t header = format == HR_W_Q4_1 ? 4 : 2, bytes = header + words * 4;
  const uint32_t offset = format == HR_W_Q8_0 ? 0x80808080u : 0;  // signed bytes -> plus 128
  auto* scales = (uint16_t*)dst;
  auto* minima = scales + groups * PANEL;
  auto* codes = (uint32_t*)(dst + scale_bytes(rows.depth) * (format == HR_W_Q4_1 ? 2 : 1));
  for (int64_t g = 0; g < groups; ++g) {
    for (int lane = 0; lane < PANEL; ++lane) {
      const int64_t feature = panel * PANEL + lane;
      const bool inside = feature < rows.features && g * GROUP < rows.depth;
      const uint8_t* block = (const uint8_t*)rows.data + (feature * (rows.depth / GROUP) + g) * bytes;
      uint16_t head[2] = {};
      uint32_t word[8] = {};
      if (inside) {
        std::memcpy(head, block, header);
        std::memcpy(word, block + header, words * 4);
        for (uint32_t& w : word) w ^= offset;
      }
      scales[g * PANEL + lane] = head[0];
      if (format == HR_W_Q4_1) minima[g * PANEL + lane] = head[1];
      for (int64_t w = 0; w < words; ++w) codes[(g * words + w) * PANEL + lane] = word[w];
    }
  }
}

void pack_grouped_panel(const Rows& rows, int64_t format, int64_t panel, uint8_t* dst) {
  const int64_t groups = padded_depth(rows.depth) / GROUP;
  auto* scales = (uint16_t*)dst;
  auto* minima = scales + groups * PANEL;
  uint8_t* codes = dst + scale_bytes(rows.depth) * (format == HR_W_Q4_1 ? 2 : 1);
  const int64_t bytes = GROUP * PANEL / (format == HR_W_Q8_0 ? 1 : 2);
  for (int64_t g = 0; g < groups; ++g) {
    for (int lane = 0; lane < PANEL; ++lane) {
      const int64_t feature = panel * PANEL + lane;
      Group group;
      std::memset(group.codes, 0, sizeof group.codes);
      if (feature < rows.features && g * GROUP < rows.depth) group = quantize_group(rows, format, feature, g);
      scales[g * PANEL + lane] = group.scale;
      if (format == HR_W_Q4_1) minima[g * PANEL + lane] = group.minimum;
      for (int k = 0; k < GROUP; ++k) {
        const int64_t step = k / 4, byte = lane * 4 + k % 4;
        if (format == HR_W_Q8_0) {
          codes[g * bytes + step * STEP_BYTES + byte] = group.codes[k];
        } else if (step < 4) {
          codes[g * bytes + step * STEP_BYTES + byte] = uint8_t(group.codes[k] | group.codes[k + 16] << 4);
        }
      }
    }
  }
}

}  // namespace

void pack_weight(int64_t format, int64_t source, const void* src, int64_t features, int64_t depth, void* dst,
                 int threads) {
  const Rows rows{source, src, features, depth};
  const int64_t panels = panel_count(features), bytes = panel_bytes(format, depth);
  auto* scales = (float*)((uint8_t*)dst + panels * bytes);
  parallel(threads, [&](Team team) {
    team.each(panels, 1, [&](int64_t panel) {
      uint8_t* to = (uint8_t*)dst + panel * bytes;
      if (is_grouped(format)) {
        source < 0 ? pack_block_panel(rows, format, panel, to) : pack_grouped_panel(rows, format, panel, to);
      } else if (format == HR_W_INT8) {
        pack_int8_panel(rows, panel, to, scales + panel * PANEL);
      } else {
        format == HR_W_BF16 ? pack_float_panel<bf16>(rows, panel, to) : pack_float_panel<float>(rows, panel, to);
      }
    });
  });
}

}  // namespace headrace
