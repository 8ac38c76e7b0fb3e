// CUDA functions of linear_logprob, in addition to the functions of linear and logprob.
#pragma once

#include "kernels/vocabulary/scored_groups.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::cuda {

// `fuses_linear_logprob`: whether a fused forward computes a call without logits in memory. The next two functions
// return the workspace of this forward and launch it.
bool fuses_linear_logprob(const LinearLogprobParams& p, int device);
WorkspaceRange fused_linear_logprob_workspace(const LinearLogprobParams& p, int device);
void fused_linear_logprob(const LinearLogprobParams& p, int device, Stream stream);

// `find_scored_groups` lists, in device memory, the groups of 16 rows that have a scored row, among at most 8192 rows.
// `zero_rows_past` clears all rows from row `groups->limit` on. Rows must be contiguous, and their bytes a multiple of
// 16.
void find_scored_groups(const LogprobInput& p, ScoredGroups* groups, int device, Stream stream);
void zero_rows_past(const ScoredGroups* groups, void* rows, std::int64_t num_rows, std::int64_t row_bytes, int device,
                    Stream stream);

// `fuses_logit_gradients`: whether a fused kernel computes gradients of logits without logits in memory.
// `logit_gradients` runs that kernel, which writes the gradients to p.dlogits in the operands' type. The hidden states
// of `head` are the rows of `groups`, side by side, up to row `groups->limit`. With LoRA, u has the same layout.
bool fuses_logit_gradients(const LogprobBackwardParams& p, const Head& head, int device);
void logit_gradients(const LogprobBackwardParams& p, const Head& head, const void* u, const ScoredGroups* groups,
                     int device, Stream stream);

}  // namespace rlk::cuda
