// Host entry points of the sequence_logprob kernels, one per architecture, and each kernel's plans. All plans give the
// same bits. sequence_logprob.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/sequence_logprob.h"

namespace rlk::cuda {

constexpr int kSequenceMostThreads = 512;  // the most threads per block
constexpr int kSequencesOfBlock = 4;       // sequences per block if a warp sums a sequence
constexpr int kSequenceChunk = 2048;       // positions that a warp adds up at a time

// The number of warps that share a sequence: one warp, or all warps of a block.
struct SequencePlan {
  int warps = 1;
};
constexpr SequencePlan kSequencePlans[] = {{1}, {2}, {4}, {8}, {16}};
SequencePlan choose_plan(const SequenceLogprobParams& p);

RLK_CUDA_KERNELS(void sequence_logprob(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
