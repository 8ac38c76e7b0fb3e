// Constants and arguments of labels and masks that host and kernels share.
#pragma once

#include <cstddef>

#include "kernels/tokens/labels.h"

namespace rlk::hip {

constexpr int kTokenThreads = 256;
constexpr std::size_t kTileLds = 2 * sizeof(std::int64_t);
constexpr std::size_t kTurnLds = 2 * kTurnThreads * sizeof(std::int64_t);

}  // namespace rlk::hip
