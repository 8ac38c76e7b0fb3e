// CPU backend of ops/linear_logprob.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/linear_logprob.h"

namespace rlk::cpu {

void linear_logprob(const LinearLogprobParams& p);
void linear_logprob_backward(const LinearLogprobBackwardParams& p);

}  // namespace rlk::cpu
