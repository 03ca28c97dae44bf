// GGUF blocks of 32 -> plain numbers, for models that are to compute with them as they are. Exact: a product of a code and
// a float16 scale fits float32, so there is one rounding a number, with a minimum to add, and one more to bf16.
#include "expand.h"

#include "team.h"
#include "weights.h"

namespace headrace {
namespace {

constexpr int64_t CHUNK = 512;  // blocks: their numbers stay in the second-level cache

// How a block is stored: scale, perhaps a minimum, perhaps the fifth bits of all codes, then the codes.
struct Form {
  int bits;
  bool minimum;

  int64_t codes() const { return 2 + (minimum ? 2 : 0) + (bits == 5 ? 4 : 0); }
  int64_t bytes() const { return codes() + (bits == 8 ? GROUP : GROUP / 2); }
};

float half_to_float(const uint8_t* p) {
  uint16_t lanes[VL];
  std::memset(lanes, 0, sizeof lanes);
  std::memcpy(lanes, p, 2);
  return load_half(lanes)[0];
}

template <int BITS, bool MINIMUM, class T>
void expand_block(const uint8_t* block, T* out) {
  constexpr Form FORM{BITS, MINIMUM};
  const float scale = half_to_float(block), minimum = MINIMUM ? half_to_float(block + 2) : 0.0f;
  const uint8_t* q = block + FORM.codes();
  uint32_t fifths = 0;
  if (BITS == 5) std::memcpy(&fifths, q - 4, 4);
  float value[GROUP];
  for (int i = 0; i < GROUP; ++i) {
    int code = BITS == 8 ? int8_t(q[i]) : i < 16 ? q[i % 16] & 15 : q[i % 16] >> 4;
    if (BITS == 5) code |= int(fifths >> i & 1) << 4;
    if (BITS != 8 && !MINIMUM) code -= 1 << (BITS - 1);
    value[i] = float(code) * scale;
    if (MINIMUM) value[i] += minimum;
  }
  for (int i = 0; i < GROUP; i += VL) store(out + i, load(value + i));
}

template <int BITS, bool MINIMUM, class T>
void expand(const uint8_t* blocks, int64_t count, T* out, int threads) {
  constexpr Form FORM{BITS, MINIMUM};
  parallel(threads, [&](Team team) {
    team.each((count + CHUNK - 1) / CHUNK, 1, [&](int64_t chunk) {
      const int64_t end = count < (chunk + 1) * CHUNK ? count : (chunk + 1) * CHUNK;
      for (int64_t b = chunk * CHUNK; b < end; ++b) {
        expand_block<BITS, MINIMUM>(blocks + b * FORM.bytes(), out + b * GROUP);
      }
    });
  });
}

template <class T>
bool expand_as(int64_t bits, bool minimum, const uint8_t* blocks, int64_t count, T* out, int threads) {
  switch (bits) {
    case 4:
      minimum ? expand<4, true>(blocks, count, out, threads) : expand<4, false>(blocks, count, out, threads);
      return true;
    case 5:
      minimum ? expand<5, true>(blocks, count, out, threads) : expand<5, false>(blocks, count, out, threads);
      return true;
    case 8:
      if (!minimum) expand<8, false>(blocks, count, out, threads);
      return !minimum;
    default:
      return false;
  }
}

}  // namespace

bool expand_blocks(int64_t bits, bool minimum, const uint8_t* blocks, int64_t count, int64_t dtype, void* out,
                   int threads) {
  return dtype == HR_F32 ? expand_as(bits, minimum, blocks, count, (float*)out, threads)
                         : expand_as(bits, minimum, blocks, count, (bf16*)out, threads);
}

}  // namespace headrace
