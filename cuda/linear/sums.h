// Host entry points of linear's sums. Arguments were checked in linear.cpp.
#pragma once

#include <cuda_runtime.h>

#include "rlk/ops/linear.h"

namespace rlk::cuda {

void linear_bias_grad_sm80(const LinearBiasGradParams& p, cudaStream_t stream);
void tree_sum_sm80(const TreeSumParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
