// attention's backward by wgmma on heads of more than 128 columns, for SM90.
#include "gradients/wgmma_sm90.cuh"

namespace rlk::cuda::sm90 {

void attention_wide_backward(const AttentionBackwardParams& p, GradientKernel kernel, cudaStream_t stream) {
  run_attention_gradients<GradientHeads::kWide>(p, kernel, stream);
}

}  // namespace rlk::cuda::sm90
