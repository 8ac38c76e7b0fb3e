// scatter_rewards for SM80 and later.
#include "rewards.cuh"

namespace rlk::cuda {
void scatter_rewards_sm80(const ScatterRewardsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_scatter_rewards<false>(p, plan, stream);
}
}  // namespace rlk::cuda
