// Packed weights: how each format lies in memory, and the panels of it.
//
// All formats split the output features into panels of 16 and pad the depth to DEPTH_ALIGN with zeros.
//   F32, BF16  panels of steps (tile.h), nothing else
//   INT8       panels of steps with w + 128 as unsigned bytes, rotated (hadamard.h); then one float32 scale per output
//              feature
//   Q8_0       per panel: float16 scales [groups of 32][16], then 8 steps a group with q + 128
//   Q4_0       per panel: float16 scales, then 4 double steps a group: low nibbles are step h, high nibbles step h + 4
//   Q4_1       as Q4_0 with float16 minima after the scales
#pragma once

#include "tile.h"
#include "types.h"

namespace headrace {

constexpr int64_t GROUP = 32;
constexpr int32_t INT8_OFFSET = 128;

inline int64_t padded_depth(int64_t depth) { return round_up(depth, DEPTH_ALIGN); }
inline int64_t panel_count(int64_t features) { return ceil_div(features, PANEL); }
inline bool is_grouped(int64_t format) { return format >= HR_W_Q4_0; }

inline int64_t panel_bytes(int64_t format, int64_t depth) {
  const int64_t padded = padded_depth(depth);
  switch (format) {
    case HR_W_F32:
      return padded * PANEL * 4;
    case HR_W_BF16:
      return padded * PANEL * 2;
    case HR_W_INT8:
      return padded * PANEL;
    case HR_W_Q4_0:
      return padded * 9;
    case HR_W_Q4_1:
      return padded * 10;
    default:
      return padded * 17;
  }
}

inline int64_t packed_bytes(int64_t format, int64_t features, int64_t depth) {
  const int64_t panels = panel_count(features);
  return panels * panel_bytes(format, depth) + (format == HR_W_INT8 ? panels * PANEL * 4 : 0);
}

inline const uint8_t* panel_of(const HrLinear& w, int64_t panel) {
  return (const uint8_t*)w.weight + panel * panel_bytes(w.format, w.in_features);
}

inline const float* int8_scales(const HrLinear& w) {
  return (const float*)panel_of(w, panel_count(w.out_features));
}

// Bytes of float16 scales (and of minima) at the head of a grouped panel.
inline int64_t scale_bytes(int64_t depth) { return padded_depth(depth) / GROUP * PANEL * 2; }

inline vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf lanes;
  for (int i = 0; i < VL; ++i) {
    // Shift the exponent into place and multiply by 2^112: exact for every finite float16, denormals included.
    uint32_t bits = uint32_t(p[i] & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude *= 5.192296858534828e33f;
    lanes[i] = p[i] & 0x8000 ? -magnitude : magnitude;
  }
  return lanes;
#endif
}

// src is plain [features, depth] of float32 (source = HR_F32) or bf16 (HR_BF16), or GGUF blocks of `format`
// (source = -1). Quantizes where format asks for it.
void pack_weight(int64_t format, int64_t source, const void* src, int64_t features, int64_t depth, void* dst,
                 int threads);

// One output feature as plain float32 [padded depth].
void unpack_row(const HrLinear& w, int64_t feature, float* row);

// One grouped panel as steps of float32 or bf16, [padded depth] deep. `ahead` is fetched into the cache on the way, as
// much as this panel takes: what this thread unpacks next, or any address where nobody knows.
void unpack_panel(const HrLinear& w, int64_t panel, Product product, uint8_t* dst, const uint8_t* ahead);

}  // namespace headrace
