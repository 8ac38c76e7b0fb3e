// HIP backend of linear: gfx90a and gfx942, bfloat16 and float16 operands.
#pragma once

#include "rlk/ops/linear.h"

namespace rlk::hip {

void linear(const LinearParams& p, int device, Stream stream);
void linear_input_grad(const LinearInputGradParams& p, int device, Stream stream);
void linear_weight_grad(const LinearWeightGradParams& p, int device, Stream stream);
void linear_bias_grad(const LinearBiasGradParams& p, int device, Stream stream);
void tree_sum(const TreeSumParams& p, int device, Stream stream);

}  // namespace rlk::hip
