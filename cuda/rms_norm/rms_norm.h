// The CUDA backend of rms_norm, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/rms_norm.h"

namespace rlk::cuda {

void rms_norm(const RmsNormParams& p, int device, Stream stream);
std::int64_t rms_norm_backward_workspace_bytes(const RmsNormBackwardParams& p);
void rms_norm_backward(const RmsNormBackwardParams& p, int device, Stream stream);

}  // namespace rlk::cuda
