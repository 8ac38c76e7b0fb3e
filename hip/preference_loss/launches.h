// Constants and arguments of preference_loss that host and kernels share.
#pragma once

#include <cstddef>

#include "kernels/losses/preference_pair.h"

namespace rlk::hip {

constexpr int kPairThreads = 256;
constexpr std::size_t kMetricLds = kPreferenceMetricThreads * sizeof(float);

}  // namespace rlk::hip
