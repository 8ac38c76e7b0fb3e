// The CUDA backend of linear, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/linear.h"

namespace rlk::cuda {

void linear(const LinearParams& p, int device, Stream stream);
void linear_input_grad(const LinearInputGradParams& p, int device, Stream stream);
void linear_weight_grad(const LinearWeightGradParams& p, int device, Stream stream);
void linear_bias_grad(const LinearBiasGradParams& p, int device, Stream stream);
void tree_sum(const TreeSumParams& p, int device, Stream stream);
std::vector<LinearProducts> linear_vendor_products(int device);

}  // namespace rlk::cuda
