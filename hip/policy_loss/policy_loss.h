// The HIP backend of policy_loss, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/policy_loss.h"

namespace rlk::hip {

std::int64_t policy_loss_workspace_bytes(const PolicyLossParams& p);
void policy_loss(const PolicyLossParams& p, int device, Stream stream);
void scale_gradients(const ScaleGradientsParams& p, int device, Stream stream);

}  // namespace rlk::hip
