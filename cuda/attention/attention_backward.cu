// The backward of attention on CUDA. CMake compiles this file once per architecture.
#include "gradients/plain.cuh"
#if RLK_CUDA_SM90
#include "gradients/wgmma_sm90.cuh"
#endif

namespace rlk::cuda::RLK_CUDA_ARCH {

void attention_backward(const AttentionBackwardParams& p, [[maybe_unused]] GradientKernel kernel, cudaStream_t stream) {
#if RLK_CUDA_SM90
  if (kernel != GradientKernel::kPasses) {
    if (p.head_dim > 128) return attention_backward_wgmma<WgmmaForm::kWide>(p, kernel, stream);
    if (!fills_tile(p)) return attention_backward_wgmma<WgmmaForm::kPadded>(p, kernel, stream);
    return run_attention_gradients<WgmmaForm::kWhole>(p, kernel, stream);
  }
#endif
  run_attention_backward(p, stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
