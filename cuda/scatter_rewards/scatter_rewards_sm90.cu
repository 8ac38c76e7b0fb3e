// scatter_rewards for SM90.
#include "rewards.cuh"

namespace rlk::cuda {
void scatter_rewards_sm90(const ScatterRewardsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_scatter_rewards<true>(p, plan, stream);
}
}  // namespace rlk::cuda
