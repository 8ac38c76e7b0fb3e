// gae for SM80 and later.
#include "scan.cuh"

namespace rlk::cuda {
void gae_sm80(const GaeParams& p, const GaePlan& plan, cudaStream_t stream) { run_gae(p, plan, stream); }
}  // namespace rlk::cuda
