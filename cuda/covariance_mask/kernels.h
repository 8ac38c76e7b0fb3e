// Host entry points of the covariance_mask kernels, one per architecture. Arguments were checked in covariance_mask.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/covariance_terms.h"

namespace rlk::cuda {

void covariance_mask_sm80(const CovarianceMaskParams& p, const TokenPlan& plan, cudaStream_t stream);
void covariance_mask_sm90(const CovarianceMaskParams& p, const TokenPlan& plan, cudaStream_t stream);

}  // namespace rlk::cuda
