// group_advantage for SM90.
#include "groups.cuh"

namespace rlk::cuda {
void group_advantage_sm90(const GroupAdvantageParams& p, cudaStream_t stream) { run_group_advantage(p, stream); }
}  // namespace rlk::cuda
