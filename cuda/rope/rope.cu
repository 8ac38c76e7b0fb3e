// rope on CUDA, compiled once per architecture.
#include "rotate.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void rope(const RopeParams& p, const RopePlan& plan, cudaStream_t stream) { run_rope<kOverlap>(p, plan, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
