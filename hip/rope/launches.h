// Constants and arguments of rope that host and kernels share.
#pragma once

#include "kernels/rows/rope_vec8s.h"

namespace rlk::hip {

constexpr int kRopeThreads = 256;      // threads per block: four waves
constexpr int kRopeHeadsOfThread = 4;  // heads that a thread rotates one after another; it loads their angles once

}  // namespace rlk::hip
