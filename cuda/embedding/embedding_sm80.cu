// embedding forward for SM80 and later.
#include "forward.cuh"

namespace rlk::cuda {
void embedding_sm80(const EmbeddingParams& p, const EmbeddingPlan& plan, cudaStream_t stream) {
  run_embedding<false>(p, plan, stream);
}
}  // namespace rlk::cuda
