// What the host and the kernels of silu_mul agree on.
#pragma once

#include "hip/common/launch_shape.h"
#include "rlk/kernels/row_split.h"
#include "rlk/ops/silu_mul.h"

namespace rlk::hip {

constexpr int kLog2Gated = 8, kGatedThreads = 1 << kLog2Gated;  // threads per block: four waves
constexpr int kGatedVec8s = 1;     // vectors per thread; two would spill scalar registers in gelu
constexpr int kGatedElements = 8;  // elements per thread where rows are no vectors

}  // namespace rlk::hip
