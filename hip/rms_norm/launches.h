// Constants and arguments of rms_norm that host and kernels share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hip/common/launch_shape.h"
#include "rlk/ops/rms_norm.h"

namespace rlk::hip {

constexpr int kNormThreads = kRmsNormLanes;  // threads per block: four waves
static_assert(kVec8 == kRmsNormLaneColumns);
// A wave computes a row of at most this many columns; a block computes a wider row.
constexpr std::int64_t kMostWaveColumns = 64 * kVec8;
constexpr std::size_t kNormLds = kNormThreads / 64 * sizeof(float);

// dweight takes two kernels. In the first kernel a thread sums eight columns over a group of 64 rows. In the second
// kernel a thread sums one column over all groups.
constexpr int kNormGroups = static_cast<int>(kRmsNormBlock) / kRmsNormGroupRows;  // groups per 8192 rows

}  // namespace rlk::hip
