// Host entry points of the mismatch_metrics kernels, one per architecture. Arguments were checked in mismatch_metrics.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/mismatch_terms.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void mismatch_metrics(const MismatchMetricsParams& p, const TokenPlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
