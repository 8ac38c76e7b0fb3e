// Host entry points of the kernels of linear_logprob. Arguments were checked in cpp/ops/linear_logprob.cpp.
#pragma once

#include <cuda_runtime.h>

#include "rlk/kernels/scored_rows.h"

namespace rlk::cuda {

void scored_rows_sm80(const ScoredRowsParams& p, cudaStream_t stream);  // compute capability 8.0 and later

}  // namespace rlk::cuda
