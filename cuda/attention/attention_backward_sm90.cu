// attention's backward for SM90.
#include "backward.cuh"

namespace rlk::cuda {
void attention_backward_sm90(const AttentionBackwardParams& p, cudaStream_t stream) {
  run_attention_backward(p, stream);
}
}  // namespace rlk::cuda
