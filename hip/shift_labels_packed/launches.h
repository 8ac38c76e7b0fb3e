// Constants and arguments of the kernels for labels and masks, which the host and the kernels share.
#pragma once

#include <cstddef>

#include "kernels/tokens/labels.h"

namespace rlk::hip {

constexpr int kTokenThreads = 256;
constexpr std::size_t kTileLds = 2 * sizeof(std::int64_t);
constexpr std::size_t kTurnLds = 2 * kTurnThreads * sizeof(std::int64_t);

}  // namespace rlk::hip
