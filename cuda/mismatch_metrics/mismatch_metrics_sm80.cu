// mismatch_metrics for SM80 and later.
#include "passes.cuh"

namespace rlk::cuda {
void mismatch_metrics_sm80(const MismatchMetricsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_mismatch_metrics<false>(p, plan, stream);
}
}  // namespace rlk::cuda
