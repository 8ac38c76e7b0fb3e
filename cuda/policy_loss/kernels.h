// Host entry points of the policy_loss kernels, one per architecture, and the ways in which each can serve a call. All
// have the same bits. Arguments were checked in policy_loss.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/policy_workspace.h"

namespace rlk::cuda {

// 2^tile positions of a sequence are a warp's (7: sequences are short) or a block's. Any serves any call.
struct PolicyPlan {
  int tile = 0;
};
constexpr PolicyPlan kPolicyPlans[] = {{7}, {10}, {11}, {12}, {13}};
PolicyPlan choose_plan(const PolicyLossParams& p, int multiprocessors);

void policy_loss_sm80(const PolicyLossParams& p, const PolicyPlan& plan, cudaStream_t stream);
void policy_loss_sm90(const PolicyLossParams& p, const PolicyPlan& plan, cudaStream_t stream);
void scale_gradients_sm80(const ScaleGradientsParams& p, cudaStream_t stream);
void scale_gradients_sm90(const ScaleGradientsParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
