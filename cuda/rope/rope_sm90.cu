// rope for SM90.
#include "rotate.cuh"

namespace rlk::cuda {
void rope_sm90(const RopeParams& p, const RopePlan& plan, cudaStream_t stream) { run_rope<true>(p, plan, stream); }
}  // namespace rlk::cuda
