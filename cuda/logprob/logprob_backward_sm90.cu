// logprob backward for SM90.
#include "backward.cuh"

namespace rlk::cuda {
void logprob_backward_sm90(const LogprobBackwardParams& p, cudaStream_t stream) { run_backward_for_dtype(p, stream); }
}  // namespace rlk::cuda
