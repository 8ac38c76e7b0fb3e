// Host entry points of the logprob kernels, one set per architecture. Arguments were checked in logprob.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/logprob_groups.h"

namespace rlk::cuda {

void logprob_forward_sm80(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream);
void logprob_forward_sm90(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream);
void logprob_merge_sm80(const LogprobMergeParams& p, cudaStream_t stream);
void logprob_backward_sm80(const LogprobBackwardParams& p, cudaStream_t stream);
void logprob_backward_sm90(const LogprobBackwardParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
