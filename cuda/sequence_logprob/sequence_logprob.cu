// sequence_logprob on CUDA, compiled once per architecture.
#include "sums.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void sequence_logprob(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream) {
  run_sequence_logprob(p, plan, stream);
}
void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, cudaStream_t stream) {
  run_sequence_logprob_backward(p, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
