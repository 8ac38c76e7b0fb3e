// gae on CUDA, compiled once per architecture.
#include "scan.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void gae(const GaeParams& p, int warps, cudaStream_t stream) { run_gae(p, warps, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
