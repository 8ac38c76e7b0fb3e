// The parts of policy_loss that ../tokens/operators.inc does not define: its plan, and the product with gradients.
#pragma once

#include "../common/kernels.h"
#include "kernels/losses/policy_batch.h"
#include "kernels/losses/policy_plain.h"

namespace rlk::cuda {

// The largest tile of plain arrays, 2^12 tokens. With larger tiles, a few blocks would still run after most other
// blocks have ended.
constexpr int kMostPlainTile = 12;
inline TokenPlan choose_policy_plan(const PolicyLossParams& p, int multiprocessors) {
  const TokenPlan plan = choose_token_plan(p.sequences, multiprocessors);
  return {is_plain(p) && plan.tile > kMostPlainTile ? kMostPlainTile : plan.tile};
}

RLK_CUDA_KERNELS(void scale_gradients(const ScaleGradientsParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
