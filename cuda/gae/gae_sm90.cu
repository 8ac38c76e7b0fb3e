// gae for SM90.
#include "scan.cuh"

namespace rlk::cuda {
void gae_sm90(const GaeParams& p, const GaePlan& plan, cudaStream_t stream) { run_gae(p, plan, stream); }
}  // namespace rlk::cuda
