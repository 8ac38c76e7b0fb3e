// Gradients of the logits of float16 operands for SM90.
#include "gradient_sm90.cuh"

namespace rlk::cuda {
void logit_gradients_f16_sm90(const LogprobBackwardParams& p, const Head& head, const void* u,
                              const ScoredGroups* groups, cudaStream_t stream) {
  run_gradients_for<Fp16>(p, head, u, groups, stream);
}
}  // namespace rlk::cuda
