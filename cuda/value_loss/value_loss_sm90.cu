// value_loss for SM90: passes over tokens. Bound by HBM: the arrays of tokens are read once, the gradient written once.
#include "../common/token_passes.cuh"
#include "kernels.h"

namespace rlk::cuda {
void value_loss_sm90(const ValueLossParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_token_passes<true, ValueBatch>(p, plan, token_terms_kernel<ValueBatch, 3, ValueTokenTerms>, stream);
  if (p.metrics == nullptr) return;
  run_token_passes<true, ValueMomentsBatch>(
      p, plan, token_terms_kernel<ValueMomentsBatch, 3, CentralTerms<ValueMoments>>, stream);
}
}  // namespace rlk::cuda
