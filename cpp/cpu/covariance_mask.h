// The CPU backend of covariance_mask, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/covariance_mask.h"

namespace rlk::cpu {

void covariance_mask(const CovarianceMaskParams& p);

}  // namespace rlk::cpu
