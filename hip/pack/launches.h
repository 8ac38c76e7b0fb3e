// Constants and arguments of pack that host and kernels share.
#pragma once

#include <cstddef>

#include "kernels/packing/pack_copy.h"
#include "kernels/packing/pack_scan.h"

namespace rlk::hip {

constexpr int kPositionThreads = 256;  // threads per row of the mask: four waves
constexpr std::size_t kPositionLds = 2 * (kPositionThreads / 64) * sizeof(std::int32_t);
constexpr std::size_t kScanLds = sizeof(PackScanShared);

}  // namespace rlk::hip
