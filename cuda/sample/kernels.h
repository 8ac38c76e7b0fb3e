// Host entry points of the kernels of sample, one per architecture. sample.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "kernels/sample/check.h"
#include "kernels/sample/process_logits.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void sample(const SampleParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void sample_partial(const SamplePartialParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void sample_merge(const SampleMergeParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void process_logits(const ProcessLogitsParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
