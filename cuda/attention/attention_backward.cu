// attention's backward on CUDA, compiled once per architecture.
#include "gradients/plain.cuh"
#if RLK_CUDA_SM90
#include "gradients/wgmma_sm90.cuh"
#endif

namespace rlk::cuda::RLK_CUDA_ARCH {

void attention_backward(const AttentionBackwardParams& p, [[maybe_unused]] GradientKernel kernel, cudaStream_t stream) {
#if RLK_CUDA_SM90
  if (kernel != GradientKernel::kPasses)
    return p.head_dim > 128 ? attention_wide_backward(p, kernel, stream)
                            : run_attention_gradients<false>(p, kernel, stream);
#endif
  run_attention_backward(p, stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
