// kl on CUDA, compiled once per architecture.
#include "kl.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void kl(const KlParams& p, const TokenPlan& plan, cudaStream_t stream) { run_kl(p, plan, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
