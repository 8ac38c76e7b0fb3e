// The HIP backend of value_loss, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/value_loss.h"

namespace rlk::hip {

std::int64_t value_loss_workspace_bytes(const ValueLossParams& p);
void value_loss(const ValueLossParams& p, int device, Stream stream);

}  // namespace rlk::hip
