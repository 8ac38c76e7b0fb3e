// CPU backend of ops/silu_mul.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/silu_mul.h"

namespace rlk::cpu {

void gated_mul(const GatedMulParams& p);
void gated_mul_backward(const GatedMulBackwardParams& p);

}  // namespace rlk::cpu
