// Host entry points of linear's sums. linear.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/linear.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void linear_bias_grad(const LinearBiasGradParams& p, cudaStream_t stream);
                 void tree_sum(const TreeSumParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
