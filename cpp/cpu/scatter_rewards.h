// The CPU backend of scatter_rewards, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/scatter_rewards.h"

namespace rlk::cpu {

void scatter_rewards(const ScatterRewardsParams& p);

}  // namespace rlk::cpu
