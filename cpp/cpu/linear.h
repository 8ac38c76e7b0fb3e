// CPU backend of ops/linear.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/linear.h"

namespace rlk::cpu {

void linear(const LinearParams& p);
void linear_input_grad(const LinearInputGradParams& p);
void linear_weight_grad(const LinearWeightGradParams& p);
void linear_bias_grad(const LinearBiasGradParams& p);
void tree_sum(const TreeSumParams& p);

}  // namespace rlk::cpu
