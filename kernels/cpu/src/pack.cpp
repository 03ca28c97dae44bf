// Packing at load: plain rows or GGUF blocks in, panels out (weights.h). Runs once, so it is written for clarity; only
// the split over threads matters.
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

void pack_float_panel(const Rows& rows, int64_t panel, bool bf16_steps, uint8_t* dst) {
  const int64_t padded = padded_depth(rows.depth);
  for (int64_t k = 0; k < padded; ++k) {
    for (int lane = 0; lane < PANEL; ++lane) {
      const float value = rows.at(panel * PANEL + lane, k);
      if (bf16_steps) {
        ((bf16*)dst)[(k / 2 * PANEL + lane) * 2 + k % 2] = narrow(value);
      } else {
        ((float*)dst)[k * PANEL + lane] = value;
      }
    }
  }
}

void pack_int8_panel(const Rows& rows, int64_t panel, uint8_t* dst, float* scales) {
  const int64_t padded = padded_depth(rows.depth);
  std::vector<float> row(padded);
  for (int lane = 0; lane < PANEL; ++lane) {
    for (int64_t k = 0; k < padded; ++k) row[k] = rows.at(panel * PANEL + lane, k);
    rotate_row(row.data(), padded);
    float largest = 0.0f;
    for (const float value : row) largest = std::fmax(largest, std::fabs(value));
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    scales[lane] = largest / 127.0f;
    for (int64_t k = 0; k < padded; ++k) {
      dst[(k / 4 * PANEL + lane) * 4 + k % 4] = uint8_t(int(std::nearbyint(row[k] * inverse)) + INT8_OFFSET);
    }
  }
}

// One group of one feature: unsigned codes, scale and minimum.
struct Group {
  uint8_t codes[GROUP];
  uint16_t scale = 0;
  uint16_t minimum = 0;
};

Group read_block(const Rows& rows, int64_t format, int64_t feature, int64_t group) {
  const int64_t header = format == HR_W_Q4_1 ? 4 : 2, bytes = header + (format == HR_W_Q8_0 ? 32 : 16);
  const auto* block = (const uint8_t*)rows.data + (feature * (rows.depth / GROUP) + group) * bytes;
  Group out;
  std::memcpy(&out.scale, block, 2);
  if (format == HR_W_Q4_1) std::memcpy(&out.minimum, block + 2, 2);
  for (int k = 0; k < GROUP; ++k) {
    const uint8_t* q = block + header;
    out.codes[k] = format == HR_W_Q8_0 ? uint8_t(q[k] + INT8_OFFSET) : k < 16 ? q[k] & 15 : q[k - 16] >> 4;
  }
  return out;
}

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
      if (feature < rows.features && g * GROUP < rows.depth) {
        group = rows.source < 0 ? read_block(rows, format, feature, g) : quantize_group(rows, format, feature, g);
      }
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
        pack_grouped_panel(rows, format, panel, to);
      } else if (format == HR_W_INT8) {
        pack_int8_panel(rows, panel, to, scales + panel * PANEL);
      } else {
        pack_float_panel(rows, panel, format == HR_W_BF16, to);
      }
    });
  });
}

}  // namespace headrace
