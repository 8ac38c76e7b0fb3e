// CUDA backend of scatter_rewards: checks memory safety, divides the work into tiles, and calls the kernels for the
// GPU's architecture.
#include "rlk/ops/scatter_rewards.h"

#include "../common/kernels.h"
#include "kernels/advantages/reward_sequence.h"
#include "kernels/advantages/reward_terms.h"
#include "rlk/backends.h"

namespace rlk::cuda {

std::int64_t scatter_rewards_workspace_bytes(const ScatterRewardsParams& p, int) {
  // The smallest tiles give the most slots, and so the largest workspace.
  return reward_workspace_bytes(p.sequences, mean_length(p.sequences) <= kWarpTokens ? kWarpTile : kLeastPlanTile);
}

void scatter_rewards(const ScatterRewardsParams& p, int device, Stream stream) {
  check_scatter_rewards(p);
  RLK_CHECK(p.workspace || p.sequences.num_slots() == 0, "scatter_rewards: a workspace is given");
  const DeviceGuard guard(device);
  const TokenPlan plan = choose_token_plan(p.sequences, multiprocessors(device));
  RLK_CUDA_IN_USE("scatter_rewards", device, scatter_rewards)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
