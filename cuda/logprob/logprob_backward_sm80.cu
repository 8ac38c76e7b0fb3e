// logprob backward for SM80 and later.
#include "backward.cuh"

namespace rlk::cuda {
void logprob_backward_sm80(const LogprobBackwardParams& p, cudaStream_t stream) { run_backward_for_dtype(p, stream); }
}  // namespace rlk::cuda
