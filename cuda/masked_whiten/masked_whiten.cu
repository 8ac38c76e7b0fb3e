// masked_whiten on CUDA, compiled once per architecture.
#include "passes.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void masked_whiten(const MaskedWhitenParams& p, int warps, cudaStream_t stream) { run_masked_whiten(p, warps, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
