// Host entry points of the importance_weights kernels, one per architecture. Arguments were checked in importance_weights.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/rejection_terms.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void importance_weights(const ImportanceWeightsParams& p, const TokenPlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
