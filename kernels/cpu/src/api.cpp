// The exported functions. Arguments were checked in Python; nothing here can fail but an allocation.
#include <unistd.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <algorithm>

#include "draw.h"
#include "expand.h"
#include "fused.h"

using namespace headrace;

#define HR_API extern "C" __attribute__((visibility("default")))

// Asks the system for AMX tile state, once a process. 0: granted, or this build does not use it.
HR_API int32_t hr_enable() {
#if defined(__AMX_TILE__) && defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return int32_t(syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA));
#else
  return 0;
#endif
}

// invariant: see Workspace.
HR_API void* hr_workspace_new(int64_t threads, int64_t invariant) { return new Workspace(int(threads), invariant != 0); }

HR_API void hr_workspace_free(void* ws) { delete (Workspace*)ws; }

HR_API int64_t hr_packed_bytes(int64_t format, int64_t features, int64_t depth) {
  return packed_bytes(format, features, depth);
}

HR_API void hr_advise_large_pages(void* p, int64_t bytes) { advise_large_pages(p, size_t(bytes)); }

HR_API void hr_pack(int64_t format, int64_t source, const void* src, int64_t features, int64_t depth, void* dst,
                    int64_t threads) {
  pack_weight(format, source, src, features, depth, dst, int(threads));
}

// 1: done. 0: no such format.
HR_API int32_t hr_expand(int64_t bits, int64_t minimum, const uint8_t* blocks, int64_t count, int64_t dtype, void* out,
                         int64_t threads) {
  return expand_blocks(bits, minimum != 0, blocks, count, dtype, out, int(threads));
}

HR_API void hr_draw(const float* logits, int64_t rows, int64_t words, const float* peak, const float* temperature,
                    const int64_t* top_k, const double* top_p, const double* min_p, const double* unit, float* scratch,
                    int64_t* tokens, int64_t threads) {
  draw(logits, rows, words, Draws{peak, temperature, top_k, top_p, min_p, unit}, scratch, tokens, int(threads));
}

HR_API void hr_linear(void* ws, const HrLinear* w, int64_t dtype, int64_t rows, const void* x, void* out,
                      int64_t out_dtype) {
  linear(*(Workspace*)ws, *w, dtype, rows, x, Output{out, w->out_features, out_dtype});
}

// Rows `ids` of a packed matrix, as `dtype` [count, in_features].
HR_API void hr_rows(void* ws, const HrLinear* w, int64_t dtype, int64_t count, const int64_t* ids, void* out) {
  Workspace& workspace = *(Workspace*)ws;
  const int64_t depth = w->in_features;
  parallel(count > 8 ? workspace.threads : 1, [&](Team team) {
    team.each_row(count, [&](int64_t i) {
      float* row = workspace.thread_scratch[team.rank].get<float>(padded_depth(depth));
      unpack_row(*w, ids[i], row);
      if (dtype == HR_F32) {
        std::memcpy((float*)out + i * depth, row, depth * 4);
      } else {
        for (int64_t k = 0; k < depth; k += VL) store_upto((bf16*)out + i * depth + k, load(row + k), depth - k);
      }
    });
  });
}

HR_API void hr_attention_block(void* ws, const HrStep* step, const HrAttention* block, int64_t layer, const void* x,
                               float* stream, void* out) {
  attention_block(*(Workspace*)ws, *step, *block, layer, x, stream, out);
}

HR_API void hr_mlp_block(void* ws, const HrMlp* block, int64_t dtype, int64_t rows, const void* x, float* stream,
                         void* out) {
  mlp_block(*(Workspace*)ws, *block, dtype, rows, x, stream, out);
}

// 0, or 1 for a token id or a place in the batch that does not exist.
HR_API int32_t hr_forward(void* ws, const HrStep* step, const HrModel* model, const HrTokens* tokens) {
  const auto within = [](const int64_t* at, int64_t count, int64_t end) {
    return std::all_of(at, at + count, [&](int64_t i) { return 0 <= i && i < end; });
  };
  if (!within(tokens->ids, step->num_tokens, model->embedding.out_features)) return 1;
  if (tokens->sample_at && !within(tokens->sample_at, tokens->sampled, step->num_tokens)) return 1;
  forward(*(Workspace*)ws, *step, *model, *tokens);
  return 0;
}

HR_API void hr_rotate_and_cache(void* ws, const HrStep* step, int64_t layer, int64_t num_heads, void* qkv,
                                void* query_out) {
  parallel(((Workspace*)ws)->threads, [&](Team team) {
    rotate_and_cache(team, *step, layer, num_heads, qkv, query_out, num_heads * step->head_dim);
  });
}

HR_API void hr_attention(void* ws, const HrStep* step, int64_t layer, int64_t num_heads, const void* query, void* out) {
  Workspace& workspace = *(Workspace*)ws;
  const int64_t width = num_heads * step->head_dim;
  const AttentionCall call = {*step, layer, num_heads, query, width, out, width};
  plan_attention(workspace, *step, call.group());
  parallel(workspace.threads, [&](Team team) { attend(team, workspace, call); });
}

// width must be a multiple of 16 in both.
HR_API void hr_rms_norm(void* ws, int64_t dtype, int64_t rows, int64_t width, const void* x, float* stream,
                        const float* weight, double eps, void* out) {
  Workspace& workspace = *(Workspace*)ws;
  const Norm norm = {x, stream, weight, float(eps), rows, width, dtype};
  const Activations to = plain_rows(dtype, width, out);
  parallel(rows > 8 ? workspace.threads : 1, [&](Team team) { norm_rows(team, workspace, norm, to); });
}

HR_API void hr_silu_mul(void* ws, int64_t dtype, int64_t rows, int64_t width, const void* x, void* out) {
  Workspace& workspace = *(Workspace*)ws;
  const Activations to = plain_rows(dtype, width, out);
  parallel(workspace.threads, [&](Team team) { silu_rows(team, workspace, x, dtype, rows, to); });
}
