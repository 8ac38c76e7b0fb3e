// optimal_token_baseline for SM80 and later.
#include "baseline.cuh"

namespace rlk::cuda {
void optimal_token_baseline_sm80(const OptimalTokenBaselineParams& p, cudaStream_t stream) {
  run_optimal_token_baseline<false>(p, stream);
}
}  // namespace rlk::cuda
