// The CUDA backend of sequence_logprob, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/sequence_logprob.h"

namespace rlk::cuda {

void sequence_logprob(const SequenceLogprobParams& p, int device, Stream stream);
void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, int device, Stream stream);

}  // namespace rlk::cuda
