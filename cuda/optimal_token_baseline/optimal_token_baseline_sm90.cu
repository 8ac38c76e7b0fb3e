// optimal_token_baseline for SM90.
#include "baseline.cuh"

namespace rlk::cuda {
void optimal_token_baseline_sm90(const OptimalTokenBaselineParams& p, cudaStream_t stream) {
  run_optimal_token_baseline<true>(p, stream);
}
}  // namespace rlk::cuda
