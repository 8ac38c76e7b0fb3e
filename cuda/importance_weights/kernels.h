// Host entry points of the importance_weights kernels, one per architecture. Arguments were checked in importance_weights.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/rejection_terms.h"

namespace rlk::cuda {

void importance_weights_sm80(const ImportanceWeightsParams& p, const TokenPlan& plan, cudaStream_t stream);
void importance_weights_sm90(const ImportanceWeightsParams& p, const TokenPlan& plan, cudaStream_t stream);

}  // namespace rlk::cuda
