// Host entry points of the covariance_mask kernels, one per architecture. Arguments were checked in covariance_mask.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/covariance_terms.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void covariance_mask(const CovarianceMaskParams& p, const TokenPlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
