// The passes over tokens of value_loss on CUDA. CMake compiles this file once per architecture. Bound by HBM: the
// arrays of tokens are read once, and the gradient is written once.
#include "../common/kernels.h"
#include "../tokens/passes.cuh"
#include "kernels/losses/value_terms.h"

namespace rlk::cuda::RLK_CUDA_ARCH {
void value_loss(const ValueLossParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_token_passes<kOverlap, ValueBatch>(p, plan, token_terms_kernel<ValueBatch, 3, ValueTokenTerms>, stream);
  if (p.metrics == nullptr) return;
  run_token_passes<kOverlap, ValueMomentsBatch>(
      p, plan, token_terms_kernel<ValueMomentsBatch, 3, CentralTerms<ValueMoments>>, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
