// embedding backward for SM80 and later.
#include "backward.cuh"

namespace rlk::cuda {
void embedding_backward_sm80(const EmbeddingBackwardParams& p, const EmbeddingBackwardPlan& plan, cudaStream_t stream) {
  run_backward<false>(p, plan, stream);
}
}  // namespace rlk::cuda
