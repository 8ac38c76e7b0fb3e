// The CUDA backend of linear, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/linear.h"

namespace rlk::cuda {

std::int64_t linear_workspace_bytes(const LinearParams& p, int device);
void linear(const LinearParams& p, int device, Stream stream);
void linear_input_grad(const LinearInputGradParams& p, int device, Stream stream);
std::int64_t linear_weight_grad_workspace_bytes(const LinearWeightGradParams& p, int device);
void linear_weight_grad(const LinearWeightGradParams& p, int device, Stream stream);
void linear_bias_grad(const LinearBiasGradParams& p, int device, Stream stream);
void tree_sum(const TreeSumParams& p, int device, Stream stream);

}  // namespace rlk::cuda
