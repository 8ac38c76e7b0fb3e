// CPU backend of ops/logprob.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/logprob.h"

namespace rlk::cpu {

void logprob(const LogprobParams& p);
void logprob_merge(const LogprobMergeParams& p);
void logprob_backward(const LogprobBackwardParams& p);

}  // namespace rlk::cpu
