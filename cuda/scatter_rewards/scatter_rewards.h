// The CUDA backend of scatter_rewards, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/scatter_rewards.h"

namespace rlk::cuda {

std::int64_t scatter_rewards_workspace_bytes(const ScatterRewardsParams& p);
void scatter_rewards(const ScatterRewardsParams& p, int device, Stream stream);

}  // namespace rlk::cuda
