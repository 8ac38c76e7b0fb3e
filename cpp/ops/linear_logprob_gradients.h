// Backward of linear_logprob, without parts of the vocabulary.
#pragma once

#include "rlk/ops/linear_logprob.h"

namespace rlk {

WorkspaceRange gradients_workspace(const LinearLogprobBackwardParams& p, Device device);
void compute_gradients(const LinearLogprobBackwardParams& p, Device device, Stream stream);

// Writes the empty sums.
void dhidden_of_no_columns(const LinearLogprobBackwardParams& p, Device device, Stream stream);

// For no rows, or a head without columns: gives main_grad as it is, and zeros.
void gradients_of_empty(const LinearLogprobBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
