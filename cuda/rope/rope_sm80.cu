// rope for SM80 and later.
#include "rotate.cuh"

namespace rlk::cuda {
void rope_sm80(const RopeParams& p, const RopePlan& plan, cudaStream_t stream) { run_rope<false>(p, plan, stream); }
}  // namespace rlk::cuda
