// The CUDA backend of importance_weights, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/importance_weights.h"

namespace rlk::cuda {

std::int64_t importance_weights_workspace_bytes(const ImportanceWeightsParams& p);
void importance_weights(const ImportanceWeightsParams& p, int device, Stream stream);

}  // namespace rlk::cuda
