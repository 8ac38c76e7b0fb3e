// The CUDA backend of silu_mul, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/silu_mul.h"

namespace rlk::cuda {

void gated_mul(const GatedMulParams& p, int device, Stream stream);
void gated_mul_backward(const GatedMulBackwardParams& p, int device, Stream stream);

}  // namespace rlk::cuda
