// The passes over tokens of mismatch_metrics on CUDA. CMake compiles this file once per architecture. Bound by
// arithmetic: a token takes five exponentials, but only nine bytes of memory with a mask of one byte per token.
#include "../common/kernels.h"
#include "../tokens/passes.cuh"
#include "kernels/losses/mismatch_terms.h"

namespace rlk::cuda::RLK_CUDA_ARCH {
void mismatch_metrics(const MismatchMetricsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_token_passes<kOverlap, MismatchBatch>(
      p, plan,
      token_terms_kernel<MismatchBatch, 2, MismatchTerms<kMismatchDifferences>, MismatchTerms<kMismatchProbabilities>>,
      stream);
  run_token_passes<kOverlap, MismatchMomentsBatch>(
      p, plan, token_terms_kernel<MismatchMomentsBatch, 2, CentralTerms<MismatchMoments>>, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
