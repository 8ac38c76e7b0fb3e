// attention's backward for SM80 and later.
#include "backward.cuh"

namespace rlk::cuda {
void attention_backward_sm80(const AttentionBackwardParams& p, cudaStream_t stream) {
  run_attention_backward(p, stream);
}
}  // namespace rlk::cuda
