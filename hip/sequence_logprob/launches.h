// Constants and arguments of sequence_logprob that host and kernels share.
#pragma once

#include <cstddef>

#include "kernels/packing/sequence_gradient.h"

namespace rlk::hip {

constexpr int kSumThreads = 256;  // threads per sequence: four waves; each sums a chunk at a time
constexpr int kSumWaves = kSumThreads / 64;
constexpr int kSequenceChunk = 2048;
constexpr int kChunksOfRound = 64;
constexpr std::size_t kSumLds = kSumWaves * sizeof(std::int64_t) + kChunksOfRound * sizeof(float);
constexpr std::size_t kGradientLds = 2 * sizeof(std::int64_t);

}  // namespace rlk::hip
