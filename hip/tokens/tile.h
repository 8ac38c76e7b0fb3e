// The tiles of passes over tokens on HIP. The tile sizes are guesses: no AMD GPU was available for measurements.
#pragma once

#include "hip/tokens/gpu.h"
#include "kernels/tokens/workspace.h"

namespace rlk::hip {

// If sequences have at most kWaveTokens tokens on average, a wave takes each tile. Up to kLeastBlockTokens a block
// takes the smallest tile that it can, above kLeastBlockTokens the largest.
constexpr std::int64_t kWaveTokens = 128, kLeastBlockTokens = 4096;

inline int token_tile(const Sequences& q) {
  const std::int64_t mean = mean_length(q);
  return mean <= kWaveTokens         ? kWaveTile<TokenGpu>
         : mean <= kLeastBlockTokens ? kLeastBlockTile<TokenGpu>
                                     : kMostBlockTile<TokenGpu>;
}

}  // namespace rlk::hip
