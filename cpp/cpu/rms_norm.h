// CPU backend of ops/rms_norm.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/rms_norm.h"

namespace rlk::cpu {

void rms_norm(const RmsNormParams& p);
void rms_norm_backward(const RmsNormBackwardParams& p);

}  // namespace rlk::cpu
