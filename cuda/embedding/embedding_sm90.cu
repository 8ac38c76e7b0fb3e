// embedding forward for SM90.
#include "forward.cuh"

namespace rlk::cuda {
void embedding_sm90(const EmbeddingParams& p, const EmbeddingPlan& plan, cudaStream_t stream) {
  run_embedding<true>(p, plan, stream);
}
}  // namespace rlk::cuda
