// How passes over tokens are cut on HIP: guesses, made without a GPU to measure on.
#pragma once

#include "hip/common/token_gpu.h"
#include "rlk/kernels/token_workspace.h"

namespace rlk::hip {

constexpr std::int64_t kWaveTokens = 128, kLeastBlockTokens = 4096;  // sequences of at most so many are waves, blocks

inline int token_tile(const Sequences& q) {
  const std::int64_t mean = mean_length(q);
  return mean <= kWaveTokens         ? kWaveTile<TokenGpu>
         : mean <= kLeastBlockTokens ? kLeastBlockTile<TokenGpu>
                                     : kMostBlockTile<TokenGpu>;
}

}  // namespace rlk::hip
