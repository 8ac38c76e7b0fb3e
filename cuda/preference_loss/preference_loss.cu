// preference_loss on CUDA, compiled once per architecture.
#include "pairs.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void preference_loss(const PreferenceLossParams& p, cudaStream_t stream) { run_preference_loss(p, stream); }
void preference_loss_backward(const PreferenceLossBackwardParams& p, cudaStream_t stream) {
  run_preference_loss_backward(p, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
