// group_advantage on CUDA, compiled once per architecture.
#include "groups.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void group_advantage(const GroupAdvantageParams& p, cudaStream_t stream) { run_group_advantage(p, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
