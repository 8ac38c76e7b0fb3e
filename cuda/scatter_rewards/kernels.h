// Host entry points of the scatter_rewards kernels, one per architecture. Arguments were checked in scatter_rewards.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/reward_terms.h"

namespace rlk::cuda {

void scatter_rewards_sm80(const ScatterRewardsParams& p, const TokenPlan& plan, cudaStream_t stream);
void scatter_rewards_sm90(const ScatterRewardsParams& p, const TokenPlan& plan, cudaStream_t stream);

}  // namespace rlk::cuda
