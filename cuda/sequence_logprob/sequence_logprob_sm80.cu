// sequence_logprob for SM80 and later.
#include "sums.cuh"

namespace rlk::cuda {
void sequence_logprob_sm80(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream) {
  run_sequence_logprob(p, plan, stream);
}
void sequence_logprob_backward_sm80(const SequenceLogprobBackwardParams& p, cudaStream_t stream) {
  run_sequence_logprob_backward(p, stream);
}
}  // namespace rlk::cuda
