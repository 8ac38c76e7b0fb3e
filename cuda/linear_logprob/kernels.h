// Host entry points of the kernels of linear_logprob. Arguments were checked in cpp/ops/linear_logprob.cpp.
#pragma once

#include <cuda_runtime.h>

#include "rlk/kernels/scored_rows.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::cuda {

void scored_rows_sm80(const ScoredRowsParams& p, cudaStream_t stream);  // compute capability 8.0 and later

// Forward without logits in memory, of rows of one stride that the copy engine can read; a workspace for all of them. u: of
// LoRA, [num_rows, lora_rank]; null without.
void linear_logprob_bf16_sm90(const LinearLogprobParams& p, const void* u, cudaStream_t stream);
void linear_logprob_f16_sm90(const LinearLogprobParams& p, const void* u, cudaStream_t stream);

// dlogits, in the operands' type, of rows of hidden states and rows of weights that the copy engine can read.
void logit_gradients_bf16_sm90(const LogprobBackwardParams& p, const Head& head, const void* u, cudaStream_t stream);
void logit_gradients_f16_sm90(const LogprobBackwardParams& p, const Head& head, const void* u, cudaStream_t stream);

}  // namespace rlk::cuda
