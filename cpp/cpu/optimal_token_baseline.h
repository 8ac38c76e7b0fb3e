// The CPU backend of optimal_token_baseline, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/optimal_token_baseline.h"

namespace rlk::cpu {

void optimal_token_baseline(const OptimalTokenBaselineParams& p);

}  // namespace rlk::cpu
