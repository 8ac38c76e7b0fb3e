// The backward of `linear_logprob`, for a dhidden that is not summed by parts of the vocabulary.
#pragma once

#include "rlk/ops/linear_logprob.h"

namespace rlk {

WorkspaceRange gradients_workspace(const LinearLogprobBackwardParams& p, Device device);
void compute_gradients(const LinearLogprobBackwardParams& p, Device device, Stream stream);

// Writes the dhidden of a head without columns: +0, the value of an empty sum.
void dhidden_of_no_columns(const LinearLogprobBackwardParams& p, Device device, Stream stream);

// For a call without rows, or a head without columns: leaves main_grad unchanged, and writes zeros to the other
// gradients.
void gradients_of_empty(const LinearLogprobBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
