// gae for SM80 and later.
#include "scan.cuh"

namespace rlk::cuda {
void gae_sm80(const GaeParams& p, int warps, cudaStream_t stream) { run_gae(p, warps, stream); }
}  // namespace rlk::cuda
