// Host entry points of the value_loss kernels, one per architecture. Arguments were checked in value_loss.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/value_terms.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void value_loss(const ValueLossParams& p, const TokenPlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
