// Host entry points of the optimal_token_baseline kernels, one per architecture. Arguments were checked in
// optimal_token_baseline.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/optimal_baseline_scan.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void optimal_token_baseline(const OptimalTokenBaselineParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
