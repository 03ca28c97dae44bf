// The C ABI: what Python fills in (kernels/cpu/library.py mirrors every struct field by field). Pointers are borrowed
// for the length of a call. Activations and plain weights of a model share one dtype; its cache may have another.
#pragma once

#include <cstdint>

extern "C" {

enum HrDtype : int32_t { HR_F32 = 0, HR_BF16 = 1, HR_S8 = 2 };

// How a linear layer's weight is packed; gemm.h describes the layouts.
enum HrFormat : int32_t { HR_W_F32 = 0, HR_W_BF16 = 1, HR_W_INT8 = 2, HR_W_Q4_0 = 3, HR_W_Q4_1 = 4, HR_W_Q8_0 = 5 };

struct HrLinear {
  const void* weight;
  const float* bias;  // [out_features] or null
  int64_t in_features;
  int64_t out_features;
  int64_t format;
};

struct HrAttention {
  HrLinear qkv;
  HrLinear output;
  const float* norm;  // [hidden]
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  double eps;
};

struct HrMlp {
  HrLinear gate_up;
  HrLinear down;
  const float* norm;  // [hidden]
  double eps;
};

// A whole model: embedding, layers, final norm, output layer.
struct HrModel {
  HrLinear embedding;
  HrLinear head;
  const HrAttention* const* attention;  // [layers]
  const HrMlp* const* mlp;              // [layers]
  const float* norm;                    // [hidden], a multiple of 16 of them
  int64_t layers;
  double eps;
};

// What a forward pass reads and writes besides the cache.
struct HrTokens {
  const int64_t* ids;        // [tokens of the step]
  const int64_t* sample_at;  // [sampled] tokens that logits are computed of; null: the first `sampled` ones
  int64_t sampled;
  void* hidden;   // [tokens][hidden] of the step's dtype
  float* logits;         // [lines][features of the head]; null: none are wanted
  const int64_t* lines;  // [sampled], where the row's logits go, negative: nowhere; null: row by row
  float* peaks;          // [sampled], the largest of each row's logits, NaN where there is one
  int64_t* best;         // [sampled], the first place of it
};

// BatchLayout, cache and rotary table of one step; see kernels/layout.py.
struct HrStep {
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const int64_t* slots;
  const int64_t* positions;
  const float* cos;
  const float* sin;
  void* const* keys;
  void* const* values;
  float* const* key_scales;    // [slots][kv heads] of each layer, where the cache is int8
  float* const* value_scales;
  int64_t num_tokens;
  int64_t num_rows;
  int64_t table_width;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_half;
  int64_t dtype;
  int64_t cache_dtype;
  int64_t serial;  // different for every step
};

}  // extern "C"
