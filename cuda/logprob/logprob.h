// The CUDA backend of logprob, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/logprob.h"

namespace rlk::cuda {

std::int64_t logprob_workspace_bytes(const LogprobParams& p, int device);
void logprob(const LogprobParams& p, int device, Stream stream);
void logprob_merge(const LogprobMergeParams& p, int device, Stream stream);
void logprob_backward(const LogprobBackwardParams& p, int device, Stream stream);

}  // namespace rlk::cuda
