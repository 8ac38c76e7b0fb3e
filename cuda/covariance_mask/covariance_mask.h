// The CUDA backend of covariance_mask, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/covariance_mask.h"

namespace rlk::cuda {

std::int64_t covariance_mask_workspace_bytes(const CovarianceMaskParams& p);
void covariance_mask(const CovarianceMaskParams& p, int device, Stream stream);

}  // namespace rlk::cuda
