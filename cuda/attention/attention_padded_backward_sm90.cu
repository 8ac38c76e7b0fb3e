// attention's backward by wgmma on heads of at most 128 columns that do not fill a tile, for SM90.
#include "gradients/wgmma_sm90.cuh"

namespace rlk::cuda::sm90 {

void attention_padded_backward(const AttentionBackwardParams& p, GradientKernel kernel, cudaStream_t stream) {
  run_attention_gradients<GradientHeads::kPadded>(p, kernel, stream);
}

}  // namespace rlk::cuda::sm90
