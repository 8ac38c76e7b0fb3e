// The tiles of passes over tokens on HIP. The tile sizes are guesses: no AMD GPU was available for measurements.
#pragma once

#include "hip/tokens/gpu.h"
#include "kernels/tokens/workspace.h"

namespace rlk::hip {

// The mean length of sequences selects the tile. Up to kWaveTokens tokens, one wave processes a tile. Up to
// kLeastBlockTokens tokens, a block processes the smallest possible tile. Above that, it processes the largest tile.
constexpr std::int64_t kWaveTokens = 128, kLeastBlockTokens = 4096;

inline int token_tile(const Sequences& q) {
  const std::int64_t mean = mean_length(q);
  return mean <= kWaveTokens         ? kWaveTile<TokenGpu>
         : mean <= kLeastBlockTokens ? kLeastBlockTile<TokenGpu>
                                     : kMostBlockTile<TokenGpu>;
}

}  // namespace rlk::hip
