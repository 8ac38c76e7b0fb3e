// gae for SM90.
#include "scan.cuh"

namespace rlk::cuda {
void gae_sm90(const GaeParams& p, int warps, cudaStream_t stream) { run_gae(p, warps, stream); }
}  // namespace rlk::cuda
