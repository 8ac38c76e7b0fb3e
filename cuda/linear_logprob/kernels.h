// Host entry points of the kernels of linear_logprob. cpp/ops/linear_logprob.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "kernels/vocabulary/scored_groups.h"
#include "kernels/vocabulary/scored_rows.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void scored_rows(const ScoredRowsParams& p, cudaStream_t stream);
                 void find_scored_groups(const LogprobInput& p, ScoredGroups* groups, cudaStream_t stream);
                 void zero_rows_past(const ScoredGroups* groups, void* rows, std::int64_t num_rows,
                                     std::int64_t row_bytes, cudaStream_t stream);)

struct Bf16;  // the operands' types (../common/element.cuh)
struct Fp16;

// Forward without logits in memory. The rows of each operand have one stride, and TMA can read them. The workspace has
// room for all rows. `u`: [num_rows, lora_rank] with LoRA, or null.
template <class T>
void run_heads(const LinearLogprobParams& p, const void* u, cudaStream_t stream);

// Computes dlogits in the operands' type. TMA must be able to read the rows of hidden states and of
// weights; `groups` is as in linear_logprob.h.
template <class T>
void run_logit_gradients(const LogprobBackwardParams& p, const Head& head, const void* u, const ScoredGroups* groups,
                         cudaStream_t stream);

}  // namespace rlk::cuda
