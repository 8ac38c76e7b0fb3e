// mismatch_metrics for SM90.
#include "passes.cuh"

namespace rlk::cuda {
void mismatch_metrics_sm90(const MismatchMetricsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_mismatch_metrics<true>(p, plan, stream);
}
}  // namespace rlk::cuda
