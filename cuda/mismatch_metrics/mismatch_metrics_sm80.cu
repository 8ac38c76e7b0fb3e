// mismatch_metrics for SM80 and later: passes over tokens. Bound by arithmetic: nine bytes of a token, and five exponentials.
#include "../common/token_passes.cuh"
#include "kernels.h"

namespace rlk::cuda {
void mismatch_metrics_sm80(const MismatchMetricsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_token_passes<false, MismatchBatch>(
      p, plan,
      token_terms_kernel<MismatchBatch, 2, MismatchTerms<kMismatchDifferences>, MismatchTerms<kMismatchProbabilities>>,
      stream);
  run_token_passes<false, MismatchMomentsBatch>(
      p, plan, token_terms_kernel<MismatchMomentsBatch, 2, CentralTerms<MismatchMoments>>, stream);
}
}  // namespace rlk::cuda
