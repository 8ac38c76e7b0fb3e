// rms_norm forward for SM80 and later.
#include "forward.cuh"

namespace rlk::cuda {
void rms_norm_sm80(const RmsNormParams& p, const RmsNormPlan& plan, cudaStream_t stream) {
  run_forward<false>(p, plan, stream);
}
}  // namespace rlk::cuda
