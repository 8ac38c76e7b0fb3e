// The inner loops of masked_whiten, one copy per instruction set (masked_whiten_simd.cpp). The arrays may have any
// alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/masked_whiten.h"
#include "rlk/tokens.h"

namespace rlk {
struct WhitenStatistics;
}

namespace rlk::cpu {

// A sequence's tokens. Element `at` of the mask belongs to the first token.
struct WhitenTokens {
  const float* x;
  TokenMask mask;
  std::int64_t at, length;
};
// Sums over the tokens that count.
struct WhitenSums {
  std::int64_t n;
  float sum, least, largest;  // least and largest leave NaNs out
};

struct MaskedWhitenLanes {
  WhitenSums (*sums)(const WhitenTokens& t);
  float (*squares)(const WhitenTokens& t, const WhitenStatistics& s);
  void (*write)(const WhitenTokens& t, const MaskedWhitenParams& p, const WhitenStatistics& s, float* y);
};

RLK_CPU_LANES(MaskedWhitenLanes, masked_whiten_simd)

}  // namespace rlk::cpu
