// HIP backend of silu_mul: gfx90a and gfx942.
#pragma once

#include "rlk/ops/silu_mul.h"

namespace rlk::hip {

void gated_mul(const GatedMulParams& p, int device, Stream stream);
void gated_mul_backward(const GatedMulBackwardParams& p, int device, Stream stream);

}  // namespace rlk::hip
