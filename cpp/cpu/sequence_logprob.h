// CPU backend of ops/sequence_logprob.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/sequence_logprob.h"

namespace rlk::cpu {

void sequence_logprob(const SequenceLogprobParams& p);
void sequence_logprob_backward(const SequenceLogprobBackwardParams& p);

}  // namespace rlk::cpu
