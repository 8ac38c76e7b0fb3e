// embedding forward on CUDA, compiled once per architecture.
#include "forward.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void embedding(const EmbeddingParams& p, const EmbeddingPlan& plan, cudaStream_t stream) {
  run_embedding<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
