// scatter_rewards on CUDA, compiled once per architecture.
#include "rewards.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void scatter_rewards(const ScatterRewardsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_scatter_rewards<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
