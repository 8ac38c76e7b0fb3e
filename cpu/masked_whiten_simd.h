// The inner loops of the operator `masked_whiten`. CMake compiles masked_whiten_simd.cpp once per instruction set. The
// arrays may have any alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/masked_whiten.h"
#include "rlk/tokens.h"

namespace rlk {
struct WhitenStatistics;
}

namespace rlk::cpu {

// The tokens of a sequence. `at` is the index of the first token in the mask.
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
