// Tokens for SM90.
#include "rows.cuh"

namespace rlk::cuda {
void sample_sm90(const SampleParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda
