// logprob backward on CUDA, compiled once per architecture.
#include "backward.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void logprob_backward(const LogprobBackwardParams& p, cudaStream_t stream) { run_backward_for_dtype(p, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
