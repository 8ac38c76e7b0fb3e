// attention for SM80 and later.
#include "forward.cuh"

namespace rlk::cuda {
void attention_sm80(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream) {
  run_attention<false>(p, plan, stream);
}
}  // namespace rlk::cuda
