// attention's backward on CUDA, compiled once per architecture.
#include "backward.cuh"
#if RLK_CUDA_SM90
#include "backward_sm90.cuh"
#endif

namespace rlk::cuda::RLK_CUDA_ARCH {

void attention_backward(const AttentionBackwardParams& p, [[maybe_unused]] GradientKernel kernel, cudaStream_t stream) {
#if RLK_CUDA_SM90
  if (kernel != GradientKernel::kPasses) return run_attention_gradients(p, kernel, stream);
#endif
  run_attention_backward(p, stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
