// The CPU backend of policy_loss, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/policy_loss.h"

namespace rlk::cpu {

void policy_loss(const PolicyLossParams& p);
void scale_gradients(const ScaleGradientsParams& p);

}  // namespace rlk::cpu
