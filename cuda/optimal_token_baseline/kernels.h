// Host entry points of the optimal_token_baseline kernels, one per architecture. Arguments were checked in
// optimal_token_baseline.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/optimal_baseline_scan.h"

namespace rlk::cuda {

void optimal_token_baseline_sm80(const OptimalTokenBaselineParams& p, cudaStream_t stream);
void optimal_token_baseline_sm90(const OptimalTokenBaselineParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
