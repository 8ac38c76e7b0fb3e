// Host entry points of the value_loss kernels, one per architecture. Plans: token_plan.h. Arguments were checked in
// value_loss.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/ops/value_loss.h"

namespace rlk::cuda {

void value_loss_sm80(const ValueLossParams& p, const PolicyPlan& plan, cudaStream_t stream);
void value_loss_sm90(const ValueLossParams& p, const PolicyPlan& plan, cudaStream_t stream);

}  // namespace rlk::cuda
