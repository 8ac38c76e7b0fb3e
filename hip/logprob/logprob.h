// HIP backend of logprob: gfx90a and gfx942, portable exponential.
#pragma once

#include "rlk/ops/logprob.h"

namespace rlk::hip {

std::int64_t logprob_workspace_bytes(const LogprobParams& p);
void logprob(const LogprobParams& p, int device, Stream stream);
void logprob_merge(const LogprobMergeParams& p, int device, Stream stream);
void logprob_backward(const LogprobBackwardParams& p, int device, Stream stream);

}  // namespace rlk::hip
