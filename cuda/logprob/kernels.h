// Host entry points of the logprob kernels, one set per architecture. Arguments were checked in logprob.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/logprob_groups.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void logprob_forward(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream);)
RLK_CUDA_KERNELS(void logprob_smoothing(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream);)
RLK_CUDA_KERNELS(void logprob_merge(const LogprobMergeParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void logprob_backward(const LogprobBackwardParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
