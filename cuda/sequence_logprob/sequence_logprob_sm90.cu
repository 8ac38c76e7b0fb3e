// sequence_logprob for SM90.
#include "sums.cuh"

namespace rlk::cuda {
void sequence_logprob_sm90(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream) {
  run_sequence_logprob(p, plan, stream);
}
void sequence_logprob_backward_sm90(const SequenceLogprobBackwardParams& p, cudaStream_t stream) {
  run_sequence_logprob_backward(p, stream);
}
}  // namespace rlk::cuda
