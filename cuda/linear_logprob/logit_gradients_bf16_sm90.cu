// Gradients of the logits of bfloat16 operands for SM90.
#include "gradient_sm90.cuh"

namespace rlk::cuda {
void logit_gradients_bf16_sm90(const LogprobBackwardParams& p, const Head& head, const void* u,
                               const ScoredGroups* groups, cudaStream_t stream) {
  run_gradients_for<Bf16>(p, head, u, groups, stream);
}
}  // namespace rlk::cuda
