// Scratch memory that outlives a call: grown on demand, never shrunk, one per backend object. One call at a time.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "activations.h"
#include "team.h"
#include "types.h"

namespace headrace {

// Large pages where the system grants them: page walks cost streaming reads several per cent.
inline void advise_large_pages(void* p, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t begin = ((uintptr_t)p + 4095) & ~uintptr_t(4095), end = ((uintptr_t)p + bytes) & ~uintptr_t(4095);
  if (end > begin) (void)madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // advice: a refusal changes nothing
#endif
}

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  template <class T>
  T* get(int64_t count) {
    const size_t bytes = size_t(round_up(count * int64_t(sizeof(T)), 64));
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, bytes);
      if (!data_) throw std::bad_alloc();
      if (bytes >= (size_t(1) << 21)) advise_large_pages(data_, bytes);
      // Padding rows and columns are multiplied like any other: they must not be slow denormals.
      std::memset(data_, 0, bytes);
      size_ = bytes;
    }
    return (T*)data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Who computes a task: vectors (decode.cpp), tiles (tiled.cpp) or, for single tokens, stream.cpp.
enum class Attention { VECTORS, TILES, STREAM };

// A part of the batch that one thread attends to: some of a row's new tokens, all query heads of one KV head, or of several
// that follow each other where it is a stream.
struct AttentionTask {
  Attention kind;
  int32_t row;
  int32_t kv_head;
  int32_t first_token;  // of the row's new tokens
  int32_t num_tokens;
  int32_t first_key;
  int32_t last_key;  // exclusive
  int64_t partial;   // where its partial result goes, in floats; -1: it writes the result itself
  int32_t num_kv_heads = 1;
  int64_t head_stride = 0;  // floats from one KV head's partial result to the next one's
  // Of a tile: whose tokens are in it, and up to which key all of them read the same blocks. `row` is the first one,
  // num_tokens what they have together, last_key the highest.
  int32_t members = 0;  // in Workspace.members
  int32_t num_members = 0;
  int32_t shared_keys = 0;
};

// Tokens of one row that share a tile with those of others.
struct TileMember {
  int32_t row;
  int32_t first_token;
  int32_t num_tokens;
  int32_t last_key;  // exclusive
};

// Partial results, one after the other, that still have to be merged.
struct MergeTask {
  bool tiled;
  int32_t row;
  int32_t kv_head;
  int32_t first_token;
  int32_t num_tokens;
  int32_t count;
  int64_t partial;
};

struct ActivationBuffers {
  Buffer data, scales, sums;
};

struct Workspace {
  Workspace(int threads, bool invariant) : threads(threads), invariant(invariant), thread_scratch(threads) {}

  const int threads;
  const bool invariant;      // a token's bits never depend on how the batch was put together
  ActivationBuffers input;   // what qkv, gate_up or a plain linear reads
  ActivationBuffers middle;  // what output or down reads
  Buffer staging;            // middle before it is quantized
  Buffer projected;          // qkv; gate and up where they cannot be fused
  Buffer embedded;           // embeddings, then what each block adds to the stream
  Buffer stream;             // the residual stream
  Buffer best;               // the largest logits
  Buffer partials;
  std::vector<Buffer> thread_scratch;
  std::vector<AttentionTask> attention;
  std::vector<TileMember> members;
  Parts attention_parts;
  std::vector<MergeTask> merges;
  int64_t partial_floats = 0;
  int64_t planned_step = -1;  // HrStep.serial and query heads per KV head the attention tasks were made for
  int64_t planned_group = 0;
};

}  // namespace headrace
