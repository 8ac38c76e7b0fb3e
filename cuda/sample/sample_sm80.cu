// Tokens for SM80 and later.
#include "rows.cuh"

namespace rlk::cuda {
void sample_sm80(const SampleParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda
