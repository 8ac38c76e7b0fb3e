// HIP backend of sequence_logprob: gfx90a and gfx942.
#pragma once

#include "rlk/ops/sequence_logprob.h"

namespace rlk::hip {

void sequence_logprob(const SequenceLogprobParams& p, int device, Stream stream);
void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, int device, Stream stream);

}  // namespace rlk::hip
