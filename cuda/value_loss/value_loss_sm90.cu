// value_loss for SM90: the kernels of every loss over tokens.
#include "../common/policy_passes.cuh"
#include "kernels.h"
#include "rlk/kernels/value_terms.h"

namespace rlk::cuda {
void value_loss_sm90(const ValueLossParams& p, const PolicyPlan& plan, cudaStream_t stream) {
  run_policy_passes<true, ValueStatisticsTerms>(p, plan, policy_tokens_kernel<ValueTokenTerms, 2>, stream);
}
}  // namespace rlk::cuda
