// rms_norm backward for SM90.
#include "backward.cuh"

namespace rlk::cuda {
void rms_norm_backward_sm90(const RmsNormBackwardParams& p, const RmsNormBackwardPlan& plan, cudaStream_t stream) {
  run_backward<true>(p, plan, stream);
}
}  // namespace rlk::cuda
