// What linear_logprob needs of CUDA beside linear and logprob.
#pragma once

#include "rlk/kernels/scored_groups.h"
#include "rlk/kernels/scored_rows.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::cuda {

void scored_rows(const ScoredRowsParams& p, int device, Stream stream);

// Whether a forward can do without logits in memory, the workspace of that, and the forward.
bool fuses_linear_logprob(const LinearLogprobParams& p, int device);
WorkspaceRange fused_linear_logprob_workspace(const LinearLogprobParams& p, int device);
void fused_linear_logprob(const LinearLogprobParams& p, int device, Stream stream);

// The groups of at most 8192 rows that have a scored row, to the device's memory; and zeros in all rows past their limit,
// of whole 16 bytes, side by side.
void find_scored_groups(const LogprobInput& p, ScoredGroups* groups, int device, Stream stream);
void zero_rows_past(const ScoredGroups* groups, void* rows, std::int64_t num_rows, std::int64_t row_bytes, int device,
                    Stream stream);

// Whether gradients of logits can do without the logits in memory; and the function that writes them to p.dlogits, in the
// operands' type. The hidden states of `head` are the rows of `groups` side by side, up to their limit; with LoRA so is u.
bool fuses_logit_gradients(const LogprobBackwardParams& p, const Head& head, int device);
void logit_gradients(const LogprobBackwardParams& p, const Head& head, const void* u, const ScoredGroups* groups,
                     int device, Stream stream);

}  // namespace rlk::cuda
