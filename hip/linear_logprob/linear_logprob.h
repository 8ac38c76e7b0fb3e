// What linear_logprob needs of HIP beside linear and logprob.
#pragma once

#include "rlk/kernels/scored_rows.h"

namespace rlk::hip {

void scored_rows(const ScoredRowsParams& p, int device, Stream stream);

}  // namespace rlk::hip
