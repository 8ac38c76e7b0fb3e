// preference_loss for SM90.
#include "pairs.cuh"

namespace rlk::cuda {
void preference_loss_sm90(const PreferenceLossParams& p, cudaStream_t stream) { run_preference_loss(p, stream); }
void preference_loss_backward_sm90(const PreferenceLossBackwardParams& p, cudaStream_t stream) {
  run_preference_loss_backward(p, stream);
}
}  // namespace rlk::cuda
