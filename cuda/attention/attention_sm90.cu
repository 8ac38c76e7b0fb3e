// attention for SM90.
#include "forward.cuh"

namespace rlk::cuda {
void attention_sm90(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream) {
  run_attention(p, plan, stream);
}
}  // namespace rlk::cuda
