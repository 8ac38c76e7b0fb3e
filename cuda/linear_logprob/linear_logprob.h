// What linear_logprob needs of CUDA beside linear and logprob.
#pragma once

#include "rlk/kernels/scored_rows.h"

namespace rlk::cuda {

void scored_rows(const ScoredRowsParams& p, int device, Stream stream);

}  // namespace rlk::cuda
