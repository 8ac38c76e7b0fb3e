// The CUDA backend of optimal_token_baseline, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/optimal_token_baseline.h"

namespace rlk::cuda {

std::int64_t optimal_token_baseline_workspace_bytes(const OptimalTokenBaselineParams& p);
void optimal_token_baseline(const OptimalTokenBaselineParams& p, int device, Stream stream);

}  // namespace rlk::cuda
