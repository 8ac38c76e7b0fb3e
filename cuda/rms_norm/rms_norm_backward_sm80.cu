// rms_norm backward for SM80 and later.
#include "backward.cuh"

namespace rlk::cuda {
void rms_norm_backward_sm80(const RmsNormBackwardParams& p, const RmsNormBackwardPlan& plan, cudaStream_t stream) {
  run_backward<false>(p, plan, stream);
}
}  // namespace rlk::cuda
