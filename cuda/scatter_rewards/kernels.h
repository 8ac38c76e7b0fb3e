// Host entry points of the scatter_rewards kernels, one per architecture. Arguments were checked in scatter_rewards.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/reward_terms.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void scatter_rewards(const ScatterRewardsParams& p, const TokenPlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
