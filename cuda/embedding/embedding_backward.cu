// embedding backward on CUDA, compiled once per architecture.
#include "backward.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void embedding_backward(const EmbeddingBackwardParams& p, const EmbeddingBackwardPlan& plan, cudaStream_t stream) {
  run_backward<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
