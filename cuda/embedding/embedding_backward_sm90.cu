// embedding backward for SM90.
#include "backward.cuh"

namespace rlk::cuda {
void embedding_backward_sm90(const EmbeddingBackwardParams& p, const EmbeddingBackwardPlan& plan, cudaStream_t stream) {
  run_backward<true>(p, plan, stream);
}
}  // namespace rlk::cuda
