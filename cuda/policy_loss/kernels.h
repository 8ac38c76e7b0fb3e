// Host entry points of the policy_loss kernels, one per architecture. Arguments were checked in policy_loss.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/kernels/policy_batch.h"

namespace rlk::cuda {

void policy_loss_sm80(const PolicyLossParams& p, const TokenPlan& plan, cudaStream_t stream);
void policy_loss_sm90(const PolicyLossParams& p, const TokenPlan& plan, cudaStream_t stream);
void scale_gradients_sm80(const ScaleGradientsParams& p, cudaStream_t stream);
void scale_gradients_sm90(const ScaleGradientsParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
