// What the host and the kernels of rope agree on.
#pragma once

#include "rlk/kernels/rope_vec8s.h"

namespace rlk::hip {

constexpr int kRopeThreads = 256;      // threads per block: four waves
constexpr int kRopeHeadsOfThread = 4;  // one after another, with the angles of their token

}  // namespace rlk::hip
