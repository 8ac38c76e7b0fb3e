// Host entry points of the sequence_logprob kernels, one per architecture, and the ways in which each can serve a call. All
// have the same bits. Arguments were checked in sequence_logprob.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/row_split.h"
#include "rlk/ops/sequence_logprob.h"

namespace rlk::cuda {

constexpr int kSequenceGroup = 64;         // threads of a chunk
constexpr int kSequenceMostThreads = 512;  // of a block

// A block has a sequence, `groups` of its chunks at a time. width: neighbouring tokens of a thread; four where rows and
// their masks begin at vectors.
struct SequencePlan {
  int width = 1, groups = 1;
};
constexpr SequencePlan kSequencePlans[] = {{4, 1}, {4, 4}, {4, 8}, {1, 1}, {1, 4}, {1, 8}};
bool serves(const SequencePlan& plan, const SequenceLogprobParams& p);
SequencePlan choose_plan(const SequenceLogprobParams& p);

void sequence_logprob_sm80(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream);
void sequence_logprob_sm90(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream);
void sequence_logprob_backward_sm80(const SequenceLogprobBackwardParams& p, cudaStream_t stream);
void sequence_logprob_backward_sm90(const SequenceLogprobBackwardParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
