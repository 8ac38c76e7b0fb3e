// Loads, stores and masks of four neighbouring tokens of a sequence. Four tokens are a lane's share of a chunk.
#pragma once

#include "hip/common/wave.h"
#include "rlk/tokens.h"

namespace rlk::hip {

constexpr int kLaneTokens = 4;

struct FourTokens {
  float v[kLaneTokens];
};

RLK_DEVICE FourTokens load_tokens(const float* data, int count, bool vectors) {
  const float* from = global_pointer(data);
  FourTokens q = {};
  if (vectors && count == kLaneTokens) {
    __builtin_memcpy(&q, __builtin_assume_aligned(from, 16), sizeof q);
  } else {
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      if (j < count) q.v[j] = from[j];
    }
  }
  return q;
}
RLK_DEVICE void store_tokens(float* data, int count, bool vectors, const FourTokens& q) {
  float* to = global_pointer(data);
  if (vectors && count == kLaneTokens) {
    __builtin_memcpy(__builtin_assume_aligned(to, 16), &q, sizeof q);
  } else {
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      if (j < count) to[j] = q.v[j];
    }
  }
}

// One bit for each of `count` tokens, set if the token is unmasked.
RLK_DEVICE unsigned load_mask(const TokenMask& mask, std::int64_t at, int count) {
  unsigned found = 0;
#pragma unroll
  for (int j = 0; j < kLaneTokens; ++j) {
    if (j < count && counts<GlobalMemory>(mask, at + j)) found |= 1u << j;
  }
  return found;
}

}  // namespace rlk::hip
