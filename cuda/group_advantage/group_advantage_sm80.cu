// group_advantage for SM80 and later.
#include "groups.cuh"

namespace rlk::cuda {
void group_advantage_sm80(const GroupAdvantageParams& p, cudaStream_t stream) { run_group_advantage(p, stream); }
}  // namespace rlk::cuda
