// What the host and the kernels of preference_loss agree on.
#pragma once

#include <cstddef>

#include "rlk/kernels/preference_pair.h"

namespace rlk::hip {

constexpr int kPairThreads = 256;
constexpr std::size_t kMetricLds = kPreferenceMetricThreads * sizeof(float);

}  // namespace rlk::hip
