// What linear_logprob needs of CUDA beside linear and logprob.
#pragma once

#include "rlk/kernels/scored_rows.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::cuda {

void scored_rows(const ScoredRowsParams& p, int device, Stream stream);

// Whether a forward can do without logits in memory, the workspace of that, and the forward.
bool fuses_linear_logprob(const LinearLogprobParams& p, int device);
WorkspaceRange fused_linear_logprob_workspace(const LinearLogprobParams& p, int device);
void fused_linear_logprob(const LinearLogprobParams& p, int device, Stream stream);

// Whether gradients of logits can do without the logits in memory, and they: of `head`, whose hidden states are rows side
// by side, to p.dlogits, which is of the operands' type. u: with LoRA, of the same rows.
bool fuses_logit_gradients(const LogprobBackwardParams& p, const Head& head, int device);
void logit_gradients(const LogprobBackwardParams& p, const Head& head, const void* u, int device, Stream stream);

}  // namespace rlk::cuda
