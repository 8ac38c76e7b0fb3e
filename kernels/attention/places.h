// Where sequences lie in packed arrays, for every backend. Offsets are clamped to the arrays.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

// Returns the same pointer, and tells HIP's compiler that the pointer does not point into LDS. A plain cast to global
// memory and back would not tell it, because the compiler drops such a cast.
template <class T>
RLK_HD T* in_memory(T* p) {
#if defined(__HIP_DEVICE_COMPILE__)
  auto* global = (__attribute__((address_space(1))) T*)p;
  asm("" : "+v"(global));
  return (T*)global;
#else
  return p;
#endif
}

// A half-open range of queries or of keys.
struct AttentionRange {
  std::int64_t first, last;
  RLK_HD bool empty() const { return first >= last; }
};

RLK_HD std::int64_t clamp_to(std::int64_t x, std::int64_t least, std::int64_t most) {
  return x < least ? least : x > most ? most : x;
}

// The range of tokens that the offsets give to sequence b.
RLK_HD AttentionRange attention_place(const std::int32_t* offsets, std::int64_t b, std::int64_t tokens) {
  const std::int64_t first = clamp_to(in_memory(offsets)[b], 0, tokens);
  return {first, clamp_to(in_memory(offsets)[b + 1], first, tokens)};
}

// The first sequence that ends after a token, or num_sequences if no sequence does. The offsets must ascend.
RLK_HD std::int64_t sequence_of(const std::int32_t* offsets, std::int64_t num_sequences, std::int64_t token) {
  std::int64_t first = 0, last = num_sequences;
  while (first < last) {
    const std::int64_t middle = (first + last) / 2;
    if (in_memory(offsets)[middle + 1] > token) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

}  // namespace rlk
