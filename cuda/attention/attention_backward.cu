// attention's backward on CUDA, compiled once per architecture.
#include "backward.cuh"
#if RLK_CUDA_SM90
#include "backward_sm90.cuh"
#endif

namespace rlk::cuda::RLK_CUDA_ARCH {

void attention_backward(const AttentionBackwardParams& p, [[maybe_unused]] GradientKernel kernel, cudaStream_t stream) {
#if RLK_CUDA_SM90
  if (kernel == GradientKernel::kWgmma) {
    return with_element_type(p.dtype, [&](auto t) {
      using T = decltype(t);
      if constexpr (T::kPacked) {
        run_attention_gradients<T>(p, stream);
        if (p.dsinks == nullptr) return;
        AttentionBackwardParams of_delta = p;  // delta lies behind the workspace of the gradients
        of_delta.workspace = static_cast<unsigned char*>(p.workspace) + GradientLayout(p).end;
        run_attention_delta<T>(of_delta, stream);
        run_attention_sinks(p, static_cast<const float*>(of_delta.workspace), stream);
      }
    });
  }
#endif
  run_attention_backward(p, stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
