// attention's backward for SM90.
#include "backward.cuh"
#include "backward_sm90.cuh"

namespace rlk::cuda {
void attention_backward_sm90(const AttentionBackwardParams& p, GradientKernel kernel, cudaStream_t stream) {
  if (kernel != GradientKernel::kWgmma) return run_attention_backward(p, stream);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) run_attention_gradients<T>(p, stream);
  });
}
}  // namespace rlk::cuda
