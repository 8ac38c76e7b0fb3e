// What linear_logprob needs on the CPU beside linear and logprob. Returns when the work is done.
#pragma once

#include "rlk/kernels/scored_rows.h"

namespace rlk::cpu {

void scored_rows(const ScoredRowsParams& p);

}  // namespace rlk::cpu
