// value_loss for SM80 and later: passes over tokens. Bound by HBM: the arrays of tokens are read once, the gradient written once.
#include "../common/token_passes.cuh"
#include "kernels.h"

namespace rlk::cuda {
void value_loss_sm80(const ValueLossParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_token_passes<false, ValueBatch>(p, plan, token_terms_kernel<ValueBatch, 3, ValueTokenTerms>, stream);
}
}  // namespace rlk::cuda
