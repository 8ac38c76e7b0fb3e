// What the host and the kernels of rms_norm agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rlk/ops/rms_norm.h"

namespace rlk::hip {

constexpr int kNormThreads = kRmsNormLanes;      // of a block: four waves
constexpr int kNormOctet = kRmsNormLaneColumns;  // columns of a thread at a time
// Rows of at most so many columns are a wave each, wider ones a block.
constexpr std::int64_t kMostWaveColumns = 64 * kNormOctet;
constexpr std::size_t kNormLds = kNormThreads / 64 * sizeof(float);

// dweight: a thread has eight columns of a group of 64 rows; then one column of all groups.
constexpr int kNormGroups = static_cast<int>(kRmsNormBlock) / kRmsNormGroupRows;  // of 8192 rows

constexpr std::int64_t kMostNormBlocks = std::int64_t{1} << 23;  // of a launch: fewer than 2^32 threads

}  // namespace rlk::hip
