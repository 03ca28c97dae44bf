// Numbers of GGUF's simple formats, for the loader.
#pragma once

#include <cstdint>

namespace headrace {

// `count` blocks of 32 with codes of so many bits (4, 5, 8) and a float16 scale each, with or without a minimum (Q4_0,
// Q4_1, …; Q8_0 has none) -> out [32 * count] of `dtype`. False: there is no such format.
bool expand_blocks(int64_t bits, bool minimum, const uint8_t* blocks, int64_t count, int64_t dtype, void* out,
                   int threads);

}  // namespace headrace
